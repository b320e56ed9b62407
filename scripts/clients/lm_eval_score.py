"""EleutherAI's lm-eval with local-completions and local-chat-completions: python lm_eval_score.py URL.

The score of multiple choices, which lm-eval takes from echoed logprobs, must be the one that `quire.LLM` gives offline.
"""

import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import lm_eval
from lm_eval.tasks import TaskManager
from local_tokenizer import tokenizer_folder, with_quire
from steps import run_steps

URL = sys.argv[1]
MODEL = json.load(urlopen(f"{URL}/v1/models"))["data"][0]["id"]
FOLDER = Path("lm_eval_task").resolve()
FACTS = """capital of France|Paris; capital of Italy|Rome; capital of Spain|Madrid; capital of Japan|Tokyo
capital of Germany|Berlin; capital of England|London; capital of Russia|Moscow; capital of China|Beijing
capital of Greece|Athens; capital of Egypt|Cairo; colour of grass|green; colour of snow|white; colour of blood|red
colour of the sky|blue; colour of coal|black; colour of a lemon|yellow; opposite of hot|cold; opposite of big|small
opposite of up|down; opposite of day|night; opposite of old|new; opposite of fast|slow; opposite of wet|dry
opposite of left|right; opposite of open|closed; opposite of good|bad; sound of a dog|bark; sound of a cat|meow
sound of a cow|moo; sound of a duck|quack; number after one|two; number after four|five; number after nine|ten
number after six|seven; first month|January; last month|December; first day of the week|Monday; king's wife|queen
largest ocean|Pacific; largest planet|Jupiter"""
PAIRS = [tuple(fact.split("|")) for fact in FACTS.replace("\n", "; ").split("; ")]
ANSWERS = [answer for _, answer in PAIRS]


def item(at: int, thing: str, answer: str) -> dict[str, Any]:
    """Four answers: the right one at a place that varies, and three of other facts."""
    choices = [ANSWERS[(at + step) % len(ANSWERS)] for step in (3, 7, 11)]
    choices.insert(at % 4, answer)
    return {"question": f"The {thing} is", "choices": choices, "label": at % 4}


ITEMS = [item(at, thing, answer) for at, (thing, answer) in enumerate(PAIRS)]
COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files: {test: items.json}\ntest_split: test\n"
CHOICE = """task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
CLOZE = """task: cloze
output_type: generate_until
doc_to_text: "Complete in one word. {{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match}
"""


def evaluate(model: str, endpoint: str, task: str, text: str, **options: Any) -> dict[str, Any]:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "items.json").write_text("\n".join(map(json.dumps, ITEMS)))
    data = COMMON.replace("items.json", str(FOLDER / "items.json"))
    (FOLDER / f"{task}.yaml").write_text(text + data)
    arguments = {"model": MODEL, "base_url": f"{URL}{endpoint}", "tokenizer": tokenizer_folder(Path("tokenizer"))}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments | {"num_concurrent": 4, "max_retries": 1, "tokenized_requests": False},
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found


def loglikelihood() -> None:
    """local-completions: 40 multiple choices by echoed logprobs, scored as by quire.LLM's prompt_logprobs offline"""
    found = evaluate("local-completions", "/v1/completions", "choice", CHOICE)
    by_client = [[float(response[0][0]) for response in sample["resps"]] for sample in found["samples"]["choice"]]
    printed = with_quire(Path(__file__).with_name("offline_choices.py"), str(FOLDER / "items.json"))
    offline = json.loads(printed.splitlines()[-1])
    assert found["results"]["choice"]["acc,none"] == offline["acc"], (found["results"], offline["acc"])
    worst = max(
        abs(one - other)
        for sums, others in zip(by_client, offline["sums"], strict=True)
        for one, other in zip(sums, others, strict=True)
    )
    assert worst < 0.05, worst
    print(f"    accuracy {offline['acc']}, online and offline; logprobs differ by {worst:.4f} at most")


def generation() -> None:
    """local-completions and local-chat-completions: 40 generations until a newline"""
    for model, endpoint, chat in (
        ("local-completions", "/v1/completions", False),
        ("local-chat-completions", "/v1/chat/completions", True),
    ):
        found = evaluate(model, endpoint, "cloze", CLOZE, apply_chat_template=chat)
        replies = [sample["resps"][0][0] for sample in found["samples"]["cloze"]]
        assert len(replies) == len(ITEMS) and all(isinstance(reply, str) for reply in replies) and any(replies)


run_steps((loglikelihood, generation))
