// JSON with line numbers for its mistakes, and as much of JSON Schema as it takes to check an answer.

const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];

export function parseJson(text) {
  try {
    return { value: JSON.parse(text), error: null };
  } catch (error) {
    const what = error.message.replace(/,? \.{3}.*| in JSON at position.*| \(line \d+.*/s, "");
    return { value: undefined, error: `Line ${text.slice(0, mistakeAt(text)).split("\n").length}: ${what}` };
  }
}

const SCALAR = /"(?:[^"\\\u0000-\u001f]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;

// Where a text ceases to be JSON: browsers do not always say.
function mistakeAt(text) {
  let at = 0;
  const skip = () => { while (" \t\r\n".includes(text[at] ?? "x")) at++; };
  const scalar = (only = "") => { SCALAR.lastIndex = at; const found = text.startsWith(only, at) && SCALAR.exec(text); if (found) at += found[0].length; return Boolean(found); };
  const take = (character) => { skip(); const found = text[at] === character; if (found) at++; skip(); return found; };
  const members = (end, one) => {
    at++;
    if (take(end)) return true;
    do if (!one()) return false; while (take(","));
    return take(end);
  };
  const value = (depth) => {
    skip();
    if (depth > 200) return false;
    if (text[at] === "{") return members("}", () => { skip(); return scalar('"') && take(":") && value(depth + 1); });
    if (text[at] === "[") return members("]", () => value(depth + 1));
    return scalar();
  };
  value(0);
  return at;
}

// The first mistake of a schema, in words, or null.
export function schemaProblem(schema, path = "the schema") {
  if (typeof schema === "boolean") return null;
  if (!schema || typeof schema !== "object" || Array.isArray(schema)) return `${path} must be an object`;
  const types = schema.type === undefined ? [] : [schema.type].flat();
  const wrong = types.find((type) => !TYPES.includes(type));
  if (wrong !== undefined) return `${path}: type ${JSON.stringify(wrong)} is none of ${TYPES.join(", ")}`;
  if (schema.enum !== undefined && !(Array.isArray(schema.enum) && schema.enum.length)) return `${path}: enum must be a list with at least one value`;
  if (schema.required !== undefined && !(Array.isArray(schema.required) && schema.required.every((name) => typeof name === "string"))) return `${path}: required must be a list of names`;
  if (schema.pattern !== undefined) {
    try {
      new RegExp(schema.pattern, "u");
    } catch (error) {
      return `${path}: pattern: ${error.message}`;
    }
  }
  for (const name of ["properties", "$defs", "definitions", "patternProperties"]) {
    const members = schema[name];
    if (members === undefined) continue;
    if (typeof members !== "object" || members === null || Array.isArray(members)) return `${path}: ${name} must be an object`;
    for (const [key, value] of Object.entries(members)) {
      const problem = schemaProblem(value, `${path}.${name}.${key}`);
      if (problem) return problem;
    }
  }
  for (const name of ["items", "additionalProperties", "not"]) {
    if (schema[name] === undefined || Array.isArray(schema[name])) continue;
    const problem = schemaProblem(schema[name], `${path}.${name}`);
    if (problem) return problem;
  }
  for (const name of ["anyOf", "oneOf", "allOf", "prefixItems"]) {
    if (schema[name] === undefined) continue;
    if (!Array.isArray(schema[name]) || !schema[name].length) return `${path}: ${name} must be a list of schemas`;
    for (const [i, value] of schema[name].entries()) {
      const problem = schemaProblem(value, `${path}.${name}[${i}]`);
      if (problem) return problem;
    }
  }
  return null;
}

const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const fits = (value, type) => typeOf(value) === type || (type === "integer" && Number.isInteger(value));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Where a value does not follow the schema, in words, or null. Keywords that are not known here are not checked.
export function violation(value, schema, root = schema, path = "$", depth = 0) {
  if (schema === true || depth > 64) return null;
  if (schema === false) return `${path} is not allowed`;
  if (schema.$ref) {
    const target = schema.$ref.split("/").slice(1).reduce((at, name) => at?.[decodeURIComponent(name)], root);
    return target === undefined ? null : violation(value, target, root, path, depth + 1);
  }
  const types = schema.type === undefined ? [] : [schema.type].flat();
  if (types.length && !types.some((type) => fits(value, type))) return `${path} is ${typeOf(value)}, not ${types.join(" or ")}`;
  if (schema.enum && !schema.enum.some((each) => same(each, value))) return `${path} is none of the allowed values`;
  if (schema.const !== undefined && !same(schema.const, value)) return `${path} is not ${JSON.stringify(schema.const)}`;
  if (typeof value === "number") {
    if (value < schema.minimum || value <= schema.exclusiveMinimum) return `${path} is too small`;
    if (value > schema.maximum || value >= schema.exclusiveMaximum) return `${path} is too large`;
  }
  if (typeof value === "string") {
    if (value.length < schema.minLength) return `${path} is too short`;
    if ([...value].length > schema.maxLength) return `${path} is too long`;
    if (schema.pattern !== undefined && !new RegExp(schema.pattern, "u").test(value)) return `${path} does not match ${schema.pattern}`;
  }
  if (Array.isArray(value)) {
    if (value.length < schema.minItems) return `${path} has too few items`;
    if (value.length > schema.maxItems) return `${path} has too many items`;
    if (schema.items && !Array.isArray(schema.items)) {
      for (const [i, item] of value.entries()) {
        const problem = violation(item, schema.items, root, `${path}[${i}]`, depth + 1);
        if (problem) return problem;
      }
    }
  }
  if (typeOf(value) === "object") {
    const missing = schema.required?.find((name) => !Object.hasOwn(value, name));
    if (missing !== undefined) return `${path} lacks ${missing}`;
    for (const [name, member] of Object.entries(value)) {
      const own = schema.properties && Object.hasOwn(schema.properties, name) ? schema.properties[name] : schema.additionalProperties ?? true;
      const problem = violation(member, own, root, `${path}.${name}`, depth + 1);
      if (problem) return problem;
    }
  }
  for (const part of schema.allOf ?? []) {
    const problem = violation(value, part, root, path, depth + 1);
    if (problem) return problem;
  }
  const some = schema.anyOf ?? schema.oneOf;
  return some && !some.some((part) => violation(value, part, root, path, depth + 1) === null) ? `${path} fits none of the alternatives` : null;
}
