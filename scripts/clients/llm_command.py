"""Simon Willison's `llm` command with a model of extra-openai-models.yaml: python llm_command.py URL."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from steps import run_steps

URL = sys.argv[1] + "/v1"
HOME = Path(tempfile.mkdtemp())
with urllib.request.urlopen(f"{URL}/models") as response:
    MODEL = json.load(response)["data"][0]["id"]
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: quire\n  model_name: {MODEL}\n  api_base: {URL}\n  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: quire-text\n  model_name: {MODEL}\n  api_base: {URL}\n  completion: true\n"
)


def llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "unused"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def models() -> None:
    """llm models lists it"""
    assert "quire" in llm("models")


def prompt() -> None:
    """llm -m, streamed and whole"""
    asked = ("-m", "quire", "Hello!", "-o", "max_tokens", "16", "-o", "temperature", "0")
    assert llm(*asked) == llm(*asked, "--no-stream") != "\n"


def conversation() -> None:
    """a system prompt, and the conversation continued with -c"""
    assert llm("-m", "quire", "Hello!", "-s", "You are brief.", "-o", "max_tokens", "8").strip()
    assert llm("-m", "quire", "-c", "And now?", "-o", "max_tokens", "8").strip()


def completion() -> None:
    """a model of plain completions"""
    assert llm("-m", "quire-text", "One, two,", "-o", "max_tokens", "8").strip()


def schema() -> None:
    """--schema: enforced by grammar"""
    wanted = json.dumps({"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]})
    found = json.loads(llm("-m", "quire", "A colour?", "--schema", wanted, "-o", "max_tokens", "32"))
    assert found["colour"] in ("red", "blue")


def tools() -> None:
    """--functions: tools with tool_choice auto"""
    code = 'def upper(text: str) -> str:\n    "Upper case."\n    return text.upper()\n'
    llm("-m", "quire", "Upper case of panda?", "--functions", code, "--chain-limit", "0", "-o", "max_tokens", "32")


run_steps((models, prompt, conversation, completion, schema, tools))
