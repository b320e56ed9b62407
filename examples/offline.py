"""Complete several prompts at once. Run: python examples/offline.py"""

from quire import LLM, SamplingParams

PROMPTS = ["The capital of Italy is", "Water boils at", "The first three primes are"]

if __name__ == "__main__":
    llm = LLM(max_model_len=2048)  # without a model name: the embedded SmolLM2-135M-Instruct
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
