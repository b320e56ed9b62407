"""Drive the engine step by step and print tokens as they come. Run: python examples/streaming.py"""

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.messages.sampling_params import RequestOutputKind, SamplingParams

PROMPTS = {"story": "Once upon a time", "facts": "The moon is"}

if __name__ == "__main__":
    engine = LLMEngine(EngineConfig.from_kwargs(max_model_len=2048))
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, params)

    texts = dict.fromkeys(PROMPTS, "")
    while engine.has_unfinished_requests():
        for output in engine.step():  # both requests advance in the same step
            texts[output.request_id] += output.outputs[0].text
            print(f"{output.request_id}: {output.outputs[0].text!r}", flush=True)

    for request_id, text in texts.items():
        print(f"{PROMPTS[request_id]}{text}")
    engine.shutdown()
