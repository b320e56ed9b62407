"""Logits processors as users write them. No torch is imported here, so a front end that loads them stays without it."""

from quire.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates

from quire.config import EngineConfig
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import SampleBatch
from quire.sample.user_processors import RowProcessor


class OnlyToken(RowProcessor):
    """Requests with the argument `target_token` get no other token."""

    def __init__(self, config: EngineConfig, device) -> None:
        super().__init__(config, device)
        self.vocab_size = config.model.vocab_size

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        token = (params.extra_args or {}).get("target_token")
        if token is not None and not isinstance(token, int):
            raise ValueError(f"target_token is {token!r}; it must be a token id")

    def add_row(self, new: NewRow) -> None:
        token = (new.params.extra_args or {}).get("target_token")
        if token is not None:
            self.rows[new.row] = token % self.vocab_size

    def apply(self, logits, batch: SampleBatch):
        for place in self.places(batch):
            token = self.rows[batch.row_list[place]]
            kept = logits[place, token].clone()
            logits[place] = float("-inf")
            logits[place, token] = kept
        return logits


class NoRepeat(RowProcessor):
    """Requests with `no_repeat` never repeat a token of the prompt or the output, the last step's included."""

    supports_drafts = True  # all it reads is in the batch

    def add_row(self, new: NewRow) -> None:
        if (new.params.extra_args or {}).get("no_repeat"):
            self.rows[new.row] = True

    def apply(self, logits, batch: SampleBatch):
        for place in self.places(batch):
            row = batch.row_list[place]
            count = int(batch.positions[place])
            logits[place, batch.token_ids[row, :count].long()] = float("-inf")
        return logits


class Counting:
    """Implements the interface without a base class: requests with `lead` count up from there."""

    changes_argmax = True

    def __init__(self, config: EngineConfig, device) -> None:
        self.next: dict[int, int] = {}

    def add_row(self, new: NewRow) -> None:
        lead = (new.params.extra_args or {}).get("lead")
        if lead is not None:
            self.next[new.row] = lead + len(new.token_ids) - new.num_prompt_tokens

    def remove_row(self, row: int) -> None:
        self.next.pop(row, None)

    @property
    def active(self) -> bool:
        return bool(self.next)

    def apply(self, logits, batch: SampleBatch):
        for place, row in enumerate(batch.row_list):
            if row in self.next:
                logits[place, self.next[row]] += 1e6
        return logits

    def sampled(self, token_ids, batch: SampleBatch) -> None:
        for place, row in enumerate(batch.row_list):
            if row in self.next and batch.done[place]:
                self.next[row] = int(token_ids[place]) + 1


class Panic(BaseException):
    """As a Rust library raises it: no Exception."""


class Faulty(RowProcessor):
    def add_row(self, new: NewRow) -> None:
        fault = (new.params.extra_args or {}).get("fault")
        if fault == "add_row":
            raise KeyError("no such thing")
        if fault:
            self.rows[new.row] = fault

    def apply(self, logits, batch: SampleBatch):
        for place in self.places(batch):
            fault = self.rows[batch.row_list[place]]
            if fault == "shape":
                return logits[:, :-1]
            if fault == "panic":
                raise Panic("something broke")
            if fault == "exit":
                raise SystemExit("something broke")
            if fault == "apply":
                raise RuntimeError("something broke")
        return logits

    def remove_row(self, row: int) -> None:
        if self.rows.get(row) == "remove_row":
            del self.rows[row]
            raise KeyError("no such row")
        super().remove_row(row)


class NoConstructor(RowProcessor):
    def __init__(self) -> None: ...


class Incomplete:
    def __init__(self, config: EngineConfig, device) -> None: ...

    def apply(self, logits, batch: SampleBatch):
        return logits


class IncompleteForVllm:
    def update_state(self, batch_update) -> None: ...


class NoRepeatForVllm(AdapterLogitsProcessor):
    """As NoRepeat, for vLLM's interface: a function for each request that uses it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        return self.mask if (params.extra_args or {}).get("no_repeat") else None

    @staticmethod
    def mask(prompt_ids, output_ids, logits):
        logits[[*prompt_ids, *output_ids]] = float("-inf")
        return logits


class OnlyTokenForVllm(LogitsProcessor):
    """As OnlyToken, for the same interface: states by index."""

    @classmethod
    def validate_params(cls, params):
        if not isinstance((params.extra_args or {}).get("target_token", 0), int):
            raise ValueError("target_token must be an int")

    def __init__(self, vllm_config, device, is_pin_memory: bool) -> None:
        self.vocab_size = vllm_config.model_config.vocab_size
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, *_: (params.extra_args or {}).get("target_token")
        )

    def apply(self, logits):
        assert logits.shape[1] == self.vocab_size
        for index, target in self.targets.items():
            kept = logits[index, target].clone()
            logits[index] = float("-inf")
            logits[index, target] = kept
        return logits


a_function = print
