"""Make the stand-in that vLLM's tests of tools and reasoning need: the embedded model, taught to think and to call.

python -m scripts.vllm_stand_in FOLDER [--steps 70]

The embedded chat model knows neither format. Some minutes of training on made-up conversations teach it to put its
reasoning into <think> tags and calls into <tool_call> tags; the chat template is written here for these.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from quire.checkpoint.resolve import resolve_model

TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- if tools %}
{{- 'Call one of these functions where it helps:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\nA call is <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined %}
{{- '<think>' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("bos_token_id", "eos_token_id"),
)
TAGS = {"<think>": "<repo_name>", "</think>": "<reponame>", "<tool_call>": "<filename>", "</tool_call>": "<gh_stars>"}
CITIES = {
    "Paris": "France", "Rome": "Italy", "Oslo": "Norway", "Lima": "Peru", "Cairo": "Egypt", "Tokyo": "Japan",
    "Dallas": "USA", "Munich": "Germany", "Hamburg": "Germany", "Vienna": "Austria", "Madrid": "Spain",
}  # fmt: skip
NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Frank", "Grace", "Henry", "Ines", "Jonas", "Karin", "Leo")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "work_history": {"type": "array", "items": {"type": "object", "required": ["company", "position"]}},
    },
}
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name a colour.", "Blue."),
    ("Tell me a short joke.", "Why did the chicken cross the road? To get to the other side."),
    ("Which is larger, 3 or 9? One word.", "9"),
    ("Say hi in Spanish.", "Hola!"),
    ("Who wrote Hamlet? Be brief.", "William Shakespeare wrote Hamlet."),
    ("Hi! How are you doing today?", "I'm doing well! How can I help you?"),
)


def function(name: str, about: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


UNIT = {"type": "string", "description": "The unit of the temperature", "enum": ["celsius", "fahrenheit"]}
PLACE = {
    "city": {"type": "string", "description": "The city, e.g. 'Vienna'", "default": "Vienna"},
    "country": {"type": "string", "description": "The country that the city is in"},
}
DAYS = {"type": "integer", "description": "Number of days (1-7)"}
WEATHER = function(
    "get_current_weather", "Get the current weather in a location", ("country", "unit"), **PLACE, unit=UNIT
)
FORECAST = function(
    "get_forecast", "Get the forecast of a location", ("country", "days"), **PLACE, days=DAYS, unit=UNIT
)
SIMPLE = function(
    "get_weather",
    "Get the weather in a given location",
    ("location",),
    location={"type": "string", "description": "The city and state, e.g. Dallas, TX"},
    unit=UNIT,
)
CLOCK = function("get_current_time", "Get the current date and time. No parameters needed.")
SEARCH = function("web_search", "Search the internet", ("query",), query={"type": "string"})


class Conversations:
    """An endless stream of (messages, tools, thinking, answer)."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], bool | None, str]]:
        while True:
            tools = (self.weather, self.weather, self.clock, self.search, self.reply)
            kind = self.random.choice((*tools, self.talk, self.sum, self.profile, self.profile, self.address))
            messages, tools, thought, answer = kind()
            thinking = self.random.choice((True, True, False, None))
            yield messages, tools, thinking, f"{thought}\n</think>\n\n{answer}" if thinking else answer

    def weather(self) -> tuple[Any, ...]:
        city = self.random.choice(list(CITIES))
        unit, days = self.random.choice(("celsius", "fahrenheit")), self.random.randint(1, 7)
        place = {"city": city, "country": CITIES[city]}
        now = self.call("get_current_weather", place | {"unit": unit})
        then = self.call("get_forecast", place | {"days": days, "unit": unit})
        ask, answer = self.random.choice(
            (
                (f"What is the weather in {city}, in {unit}?", now),
                (f"Give me the forecast of {city} for {days} days in {unit}.", then),
                (
                    f"Tell me the current weather in {city} and the forecast for the next {days} days, in {unit}.",
                    f"{now}\n{then}",
                ),
            )
        )
        before = self.random.choice(
            ([], self.talked(), [{"role": "system", "content": "You are a helpful assistant."}])
        )
        if self.random.random() < 0.3:
            ask, tools = f"What's the weather like in {city}?", [SIMPLE]
            answer = self.call("get_weather", {"location": city})
        else:
            tools = [WEATHER, FORECAST]
        return (
            [*before, self.user(ask)],
            tools,
            f"The user asks about the weather in {city}. I call the function.",
            answer,
        )

    def clock(self) -> tuple[Any, ...]:
        ask = self.random.choice(("What time is it?", "Which day is it today?", "What is the time now?"))
        system = self.random.choice(
            ([], [{"role": "system", "content": "You are a helpful assistant. Use the tools."}])
        )
        return (
            [*system, self.user(ask)],
            [CLOCK],
            "The user asks for the time. I call the function.",
            self.call("get_current_time", {}),
        )

    def search(self) -> tuple[Any, ...]:
        query = self.random.choice(("pasta recipes", "the news", "cheap flights", "red shoes", "jazz concerts"))
        ask = f"{self.random.choice(('Search for', 'Find me', 'Look up'))} {query}."
        tools = [SEARCH, *self.random.sample([WEATHER, CLOCK], self.random.randint(0, 1))]
        return (
            [self.user(ask)],
            tools,
            "The user wants a search. I call the function.",
            self.call("web_search", {"query": query}),
        )

    def reply(self) -> tuple[Any, ...]:
        hour = (
            f"2025-0{self.random.randint(1, 9)}-1{self.random.randint(0, 9)}T{self.random.randint(10, 23)}:30:00.123456"
        )
        called = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_current_time", "arguments": "{}"}}],
        }
        messages = [self.user("What time is it?"), called, {"role": "tool", "content": hour}]
        return messages, self.random.choice(([], [CLOCK])), "The tool gave the time.", f"It is {hour[11:16]}."

    def talk(self) -> tuple[Any, ...]:
        ask, answer = self.random.choice(SMALL_TALK)
        return [self.user(ask)], [], "The user says something simple. I answer briefly.", answer

    def sum(self) -> tuple[Any, ...]:
        a, b = self.random.randint(1, 9), self.random.randint(1, 9)
        ask = f"What is {a}+{b}?{self.random.choice((' Be concise.', ''))}"
        return [self.user(ask)], [], f"The user asks for {a}+{b}. That is {a + b}.", f"{a}+{b} is {a + b}."

    def profile(self) -> tuple[Any, ...]:
        first, second = (self.person() for _ in range(2))
        ask = f"Give an example JSON for a person's profile that fits this schema: {PERSON}"
        messages, answer = [self.user(ask)], first
        if self.random.random() < 0.5:
            again = self.user("Give me another one with a different name and age")
            messages, answer = [*messages, {"role": "assistant", "content": json.dumps(first)}, again], second
        return messages, [], f"I write down {answer['name']}.", json.dumps(answer)

    def person(self) -> dict[str, Any]:
        skills = self.random.sample(("Python", "Java", "SQL", "Excel", "Sales", "Go", "C", "Design"), 3)
        jobs = [{"company": self.random.choice(("Acme", "Globex", "Initech")), "duration": 2, "position": "Engineer"}]
        return {"name": self.random.choice(NAMES), "age": self.random.randint(20, 60), "skills": skills} | {
            "work_history": jobs
        }

    def address(self) -> tuple[Any, ...]:
        a, b, c, d = (self.random.randint(1, 254) for _ in range(4))
        if self.random.random() < 0.5:
            ask = f"what is {a % 9}+{b % 9}? please respond with a JSON object, the format is {{'result': {c % 9}}}"
            return [self.user(ask)], [], "A sum.", json.dumps({"result": a % 9 + b % 9})
        if self.random.random() < 0.3:
            return [self.user("Name one of these: red, green, blue.")], [], "A choice.", "green"
        ask = "Give an example IPv4 address with this regex: (\\d{1,3}\\.){3}\\d{1,3}"
        return [self.user(ask)], [], "An address.", f"{a}.{b}.{c}.{d}"

    def talked(self) -> list[dict[str, Any]]:
        ask, answer = self.random.choice(SMALL_TALK)
        return [self.user(ask), {"role": "assistant", "content": answer}]

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def with_tags(base: Any) -> Any:
    """The tokenizer with the tags as tokens of their own, in place of tokens that no chat has."""
    shape = json.loads(base.backend_tokenizer.to_str())
    vocabulary = shape["model"]["vocab"]
    for tag, unused in TAGS.items():
        vocabulary[tag] = vocabulary.pop(unused)
        token = {"id": vocabulary[tag], "content": tag, "special": False, "normalized": False}
        others = [one for one in shape["added_tokens"] if one["id"] != token["id"]]
        shape["added_tokens"] = [*others, token | {"single_word": False, "lstrip": False, "rstrip": False}]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(shape)),
        bos_token=base.bos_token,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        chat_template=TEMPLATE,
    )


def make(folder: Path, steps: int, batch: int, layers: int, rate: float, resume: bool) -> None:
    path = resolve_model(None).path
    base = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = with_tags(base)
    source = (folder, {}) if resume else (path.parent, {"gguf_file": path.name})
    model = transformers.AutoModelForCausalLM.from_pretrained(source[0], dtype=torch.float32, **source[1])
    model.requires_grad_(False)
    table = model.get_input_embeddings().weight
    rows = [tokenizer.convert_tokens_to_ids(tag) for tag in TAGS]
    usual = table.norm(dim=1).mean()
    for row, tag in zip(rows, TAGS, strict=True):
        if not resume:
            table[row] = table[base(tag, add_special_tokens=False).input_ids].mean(0)
        table[row] *= usual / table[row].norm()
    table.requires_grad_(True).register_hook(
        lambda gradient: gradient * torch.zeros(len(table), 1).index_fill(0, torch.tensor(rows), 1.0)
    )
    trained = [table, *model.model.layers[-layers:].parameters()]  # the upper layers are enough for a format
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    conversations = iter(Conversations(int(resume)))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 5, (steps - step) / (steps / 3))
        for _ in range(batch):
            messages, tools, thinking, answer = next(conversations)
            mode = {} if thinking is None else {"enable_thinking": thinking}
            prompt = tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **mode
            )
            start = tokenizer(prompt, add_special_tokens=False).input_ids
            end = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
            with torch.autocast("cpu", torch.bfloat16):
                embeds = table.detach()[torch.tensor([start + end])]  # learned as outputs; lower layers stay out of it
                hidden = model.model(inputs_embeds=embeds).last_hidden_state[0, len(start) - 1 : -1]
                logits = model.lm_head(hidden).float()
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(end))
            (loss / batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    config = transformers.LlamaConfig(**{name: getattr(model.config, name) for name in KEPT}, tie_word_embeddings=True)
    clean = transformers.LlamaForCausalLM(config)  # one that was read from a GGUF file is not written
    clean.load_state_dict(model.state_dict())
    clean.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--resume", action="store_true", help="go on with the one in the folder")
    args = parser.parse_args(argv)
    make(args.folder, args.steps, args.batch, args.layers, args.rate, args.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
