"""A server whose model says what it is asked to, for tests of the page: `python parrot.py [FLAG...]` prints its URL.

What follows "SAY:" in the last message is repeated, and "COUNT n" gives n words. Everything but the model is real.
"""

import argparse
import sys

from quire.bench.internal.stub_engine import StubEngine
from quire.config.server import ServerConfig
from quire.entrypoints.http.app import build_app
from quire.entrypoints.http.server import Server, base_url, bind
from quire.messages.requests import EngineCoreRequest


class Parrot:
    def __init__(self) -> None:
        self.engine = StubEngine(self.next_token)
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self._texts: dict[str, list[int]] = {}

    def next_token(self, request: EngineCoreRequest, count: int) -> int:
        if request.request_id not in self._texts:
            prompt = self.tokenizer.decode(list(request.prompt_token_ids), False)
            self._texts[request.request_id] = self.tokenizer.encode(answer_to(prompt), add_special_tokens=False)
        ids = self._texts[request.request_id]
        return ids[count] if count < len(ids) else request.eos_token_ids[0]


def answer_to(prompt: str) -> str:
    last = prompt.rpartition("<|im_start|>user")[2].partition("<|im_end|>")[0]
    if "SAY:" in last:
        return last.partition("SAY:")[2].strip().replace("\\n", "\n")
    if "COUNT" in last:
        number = int(last.partition("COUNT")[2].split()[0])
        words = [
            f"**Word {i}** of `{number}`, and so on it goes.\n\n" if i % 40 == 0 else "word " for i in range(number)
        ]
        return "".join(words)
    return "You said: " + last.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--api-key", nargs="*", default=())
    parser.add_argument("--name", nargs="*", default=("parrot",))
    args = parser.parse_args()
    engine = Parrot().engine
    engine.step_seconds = args.step_seconds
    config = ServerConfig(host=args.host, port=0, served_model_name=tuple(args.name), tool_call_parser="hermes")
    config.shutdown_timeout = 0.5
    sock = bind(config)
    app = build_app(engine, config, engine.config, tuple(args.api_key))
    Server(app, config, ready=lambda: print(base_url(sock, config), flush=True)).run(sockets=[sock])


if __name__ == "__main__":
    sys.exit(main())
