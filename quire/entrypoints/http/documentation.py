"""GET /docs and /redoc: a page that shows /openapi.json, without assets from elsewhere."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire API</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 } b { display: inline-block; width: 4rem }
pre { background: #8881; padding: .7rem; overflow: auto } details { border-bottom: 1px solid #8884 }
</style>
</head>
<body>
<h1>Quire API</h1>
<p>From <a href="openapi.json">openapi.json</a>. <label>API key: <input id="key" type="password"></label></p>
<div id="paths"></div>
<script>
const paths = document.getElementById("paths"), key = document.getElementById("key");
const part = (tag, text) => Object.assign(document.createElement(tag), {textContent: text});
function shape(schema, all) {
  const name = schema && schema["$ref"] && schema["$ref"].split("/").pop();
  return JSON.stringify(name ? {[name]: all[name]} : schema, null, 2);
}
async function show() {
  const headers = key.value ? {Authorization: "Bearer " + key.value} : {};
  const response = await fetch("openapi.json", {headers});
  if (!response.ok) { paths.replaceChildren(part("p", "openapi.json: " + response.status)); return; }
  const api = await response.json(), all = api.components.schemas, found = [];
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const one = document.createElement("details"), title = document.createElement("summary");
      title.append(part("b", method.toUpperCase()), part("code", path));
      one.append(title);
      const content = operation.requestBody && operation.requestBody.content["application/json"];
      if (content) one.append(part("h4", "body"), part("pre", shape(content.schema, all)));
      const answer = ((operation.responses["200"] || {}).content || {})["application/json"];
      if (answer) one.append(part("h4", "response"), part("pre", shape(answer.schema, all)));
      found.push(one);
    }
  }
  paths.replaceChildren(...found);
}
key.onchange = show;
show();
</script>
</body>
</html>
"""


def documentation() -> list[Route]:
    async def page(request: Request) -> Response:
        return HTMLResponse(PAGE)

    return [Route(path, page, methods=["GET"], include_in_schema=False) for path in ("/docs", "/redoc")]
