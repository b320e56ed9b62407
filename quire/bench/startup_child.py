"""The process that `quire bench startup` measures: marks the end of each phase and prints the marks."""

import time

marks = {"interpreter": time.time()}  # before any import that belongs to the next phase

if __name__ == "__main__":
    import json
    import sys

    task = json.loads(sys.argv[1])

    from quire import LLM, SamplingParams

    marks["import"] = time.time()
    llm = LLM(**task["options"])
    marks["load"] = time.time()
    llm.generate([task["prompt"]], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    marks["first token"] = time.time()
    llm.shutdown()
    print(json.dumps(marks))
