"""A worker without a model, for scheduler tests.

It keeps what a real one keeps (rows, block tables) and a KV cache whose slots hold (token, position). The next token
is a function of the whole context as read back through the block table, so any wrong block, lost write or mixed-up row
changes the output or trips an assertion.
"""

import zlib
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.kv_transfers import KVTransfers
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.messages.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    PagePart,
    SlidingWindowSpec,
    StateSpec,
)
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import ContentKey, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import SamplingParams

VOCAB = 50
MOST_DRAFTS = 4


def next_token(context: np.ndarray, seed: int) -> int:
    return zlib.crc32(context.astype(np.int32).tobytes(), seed & 0xFFFF) % VOCAB


def expected_tokens(prompt, max_tokens, seed=0, stop_ids=(), max_model_len=10**9) -> list[int]:
    context, out = list(prompt), []
    while len(out) < max_tokens and len(context) < max_model_len:
        token = next_token(np.asarray(context), seed)
        context.append(token)
        out.append(token)
        if token in stop_ids:
            break
    return out


def expected_pooled(prompt, whole: bool) -> list[float]:
    """As FakeWorker pools: the last token's context, and the sum of all tokens where the whole prompt is needed."""
    return [next_token(np.asarray(prompt), 0), sum(prompt) if whole else 0]


def spec(block_size=4, window=None) -> KVCacheSpec:
    if window is None:
        return FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype="float32")
    return SlidingWindowSpec(block_size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window)


def state_spec(block_size=4) -> KVCacheSpec:
    return StateSpec(block_size, (PagePart((2,), "float32"),))


def state_of(tokens) -> tuple[int, int]:
    return hash(tuple(map(int, tokens))), len(tokens)


def request(name, key=(0, 0), prompt=range(4), num_groups=1) -> Request:
    core = EngineCoreRequest(name, 0, np.asarray(prompt, np.int32), SamplingParams(), (), 0, 0.0)
    return Request(core, key, num_groups)


def fixed_drafts(context: np.ndarray, seed: int, count: int) -> list[int]:
    return [7] * count


def random_drafts(context: np.ndarray, seed: int, count: int) -> list[int]:
    return [(next_token(context, seed + 1) * (j + 3)) % VOCAB for j in range(count)]


def right_drafts(context: np.ndarray, seed: int, count: int, right: int = MOST_DRAFTS) -> list[int]:
    tokens = expected_tokens(context, count, seed)
    return [token if j < right else (token + 1) % VOCAB for j, token in enumerate(tokens)]


def half_right_drafts(context: np.ndarray, seed: int, count: int) -> list[int]:
    return right_drafts(context, seed, count, int(context.sum()) % (count + 1))


PROPOSERS: dict[str, Callable[[np.ndarray, int, int], list[int]]] = {
    "fixed": fixed_drafts,
    "random": random_drafts,
    "half right": half_right_drafts,
    "right": right_drafts,
}


class FakeWorker:
    def __init__(self, config: KVCacheConfig, kv: KVCacheManager, max_model_len: int) -> None:
        self.groups = config.groups
        self.kv = kv
        self.max_model_len = max_model_len
        self.page = max(g.spec.block_size for g in config.groups)  # slots a page has room for, whatever the group
        self.cache = np.full(((config.num_blocks + 1) * self.page, 2), -1, np.int64)
        self.rows: dict[int, dict] = {}
        self.max_tokens_seen = 0
        self.num_accepted = 0  # drafts
        self.num_drafts = 0
        self.verified: dict[int, list[int]] = {}  # by row: the drafts of the newest plan
        self.propose = PROPOSERS["fixed"]
        self.finds = False  # results say how many drafts there are
        self.shared: set[int] = set()  # blocks with several owners when the plan was made

    def _slots(self, row: dict, group: int, positions: np.ndarray) -> np.ndarray:
        size = self.groups[group].spec.block_size
        blocks = np.asarray(row["blocks"][group])[positions // size]
        return blocks * self.page + positions % size

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.max_tokens_seen = max(self.max_tokens_seen, plan.total_tokens)
        for row in plan.finished_rows:
            self.rows.pop(row, None)
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row was given away twice"
            most_new = 0 if new.pooling is not None else new.params.max_tokens
            assert new.token_limit == min(self.max_model_len, new.num_prompt_tokens + most_new)
            self.rows[new.row] = {
                "tokens": list(new.token_ids),
                "computed": new.num_computed,
                "blocks": [list(ids) for ids in new.block_ids],
                "seed": new.seed,
                "limit": new.token_limit,
                "drafts": self.propose(new.token_ids, new.seed, MOST_DRAFTS),
                "pooling": new.pooling,
                "sum": 0,
            }
        appended = plan.appended
        for row, group, position, block in zip(
            appended.rows, appended.groups, appended.positions, appended.block_ids, strict=True
        ):
            blocks = self.rows[row]["blocks"][group]
            assert position == len(blocks)
            blocks.append(block)
        for source, target in plan.block_copies:
            page = self.page
            self.cache[target * page : (target + 1) * page] = self.cache[source * page : (source + 1) * page]
        self._check_states(plan)
        self._write(plan)
        drafts = self._num_drafts(plan)
        tokens = np.full((len(plan.rows), 1 + max(drafts, default=0)), -7, np.int32)
        num_sampled = np.zeros(len(plan.rows), np.int32)
        pooled: dict[int, np.ndarray] = {}
        for i, (r, n) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            row = self.rows[int(r)]
            row["computed"] += int(n) - drafts[i]
            if row["pooling"] is not None:
                assert not drafts[i], "drafts of a row that pools"
                self._pool(row, int(n), i, pooled)
                continue
            held = row["drafts"][: drafts[i]]
            self.verified[int(r)] = held
            if row["computed"] == len(row["tokens"]):
                for j in range(drafts[i] + 1):
                    if len(row["tokens"]) == row["limit"]:
                        assert self.num_drafts, "planned past the request's limit"
                        break
                    self._check_context(row)
                    tokens[i, j] = next_token(np.asarray(row["tokens"]), row["seed"])
                    row["tokens"].append(int(tokens[i, j]))
                    num_sampled[i] += 1
                    if j == drafts[i] or held[j] != tokens[i, j]:
                        break
                    row["computed"] += 1
                    self.num_accepted += 1
                row["computed"] = len(row["tokens"]) - 1
                row["drafts"] = self.propose(np.asarray(row["tokens"]), row["seed"], MOST_DRAFTS)
        proposed = [self.rows[int(r)]["drafts"] for r in plan.rows]
        most = np.asarray(proposed, np.int32).reshape(len(proposed), MOST_DRAFTS)[:, : self.num_drafts]
        output = ModelRunnerOutput(tokens, num_sampled, drafts=most if self.num_drafts else None, pooled=pooled)
        if self.finds and plan.num_drafts is not None:
            output.num_found = np.asarray([self._found(self.rows[int(r)]) for r in plan.rows], np.int32)
        return output

    def _found(self, row: dict) -> int:
        """Of every three tokens of a row, one has nothing behind it."""
        return len(row["tokens"]) % 3 and self.num_drafts

    def _pool(self, row: dict, count: int, place: int, pooled: dict[int, np.ndarray]) -> None:
        """Accumulates chunks; a vector if the prompt is complete."""
        if row["pooling"].skip_reading_prefix_cache:
            row["sum"] += sum(row["tokens"][row["computed"] - count : row["computed"]])
        if row["computed"] == len(row["tokens"]):
            self._check_context(row)
            pooled[place] = np.array([next_token(np.asarray(row["tokens"]), 0), row["sum"]], np.float32)

    @staticmethod
    def _num_drafts(plan: SchedulerOutput) -> list[int]:
        return plan.num_drafts.tolist() if plan.num_drafts is not None else [0] * len(plan.rows)

    def _write(self, plan: SchedulerOutput) -> None:
        written: set[int] = set()
        for r, n, num_drafts in zip(plan.rows, plan.num_tokens, self._num_drafts(plan), strict=True):
            row = self.rows[int(r)]
            assert n > num_drafts >= 0
            positions = np.arange(row["computed"], row["computed"] + n)
            tokens = np.asarray([*row["tokens"], *row["drafts"][:num_drafts]])
            assert positions[-1] < len(tokens), "advanced past the known tokens"
            assert not num_drafts or row["computed"] == len(row["tokens"]) - 1, "drafts of a row that does not decode"
            for group, layout in enumerate(self.groups):
                if isinstance(layout.spec, StateSpec):
                    slots, content = self._states(row, group, int(n))
                else:
                    slots, content = self._slots(row, group, positions), np.stack([tokens[positions], positions], 1)
                assert (slots >= self.page).all(), "wrote to the null block"
                assert not written & set(slots.tolist()), "two rows write one slot"
                written |= set(slots.tolist())
                # A block may get a second owner in the plan that fills it, but once shared it stays as it is.
                for block in set((slots // self.page).tolist()) & self.shared:
                    assert self.kv.pool.blocks[block].ref < 2, "wrote to a shared block"
                self.cache[slots] = content

    def _states(self, row: dict, group: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Pages that the next `count` tokens write, and states: a hash of all tokens before, and how many those are."""
        size, first = self.groups[group].spec.block_size, row["computed"]
        blocks = np.arange(first // size, (first + count - 1) // size + 1)
        lengths = np.minimum((blocks + 1) * size, first + count)
        states = [state_of(row["tokens"][:length]) for length in lengths]
        return np.asarray(row["blocks"][group])[blocks] * self.page, np.asarray(states)

    def _check_states(self, plan: SchedulerOutput) -> None:
        """Each row begins from the state after its computed tokens, which an earlier plan left."""
        for row in (self.rows[int(r)] for r in plan.rows):
            for group, layout in enumerate(self.groups):
                if isinstance(layout.spec, StateSpec) and row["computed"]:
                    self._check_state(row, group)

    def _check_state(self, row: dict, group: int) -> None:
        length, size = row["computed"], self.groups[group].spec.block_size
        found = self.cache[row["blocks"][group][(length - 1) // size] * self.page]
        assert tuple(found) == state_of(row["tokens"][:length]), "a page holds another state"

    def _check_context(self, row: dict) -> None:
        """What attention would read is what the row was given, in every group."""
        length = row["computed"]
        for group, layout in enumerate(self.groups):
            if isinstance(layout.spec, StateSpec):
                self._check_state(row, group)
                continue
            window = getattr(layout.spec, "sliding_window", None)
            first = max(0, length - window) if window else 0
            positions = np.arange(first, length)
            read = self.cache[self._slots(row, group, positions)]
            assert (read[:, 1] == positions).all(), "a block holds other positions"
            assert (read[:, 0] == np.asarray(row["tokens"])[positions]).all(), "a block holds other tokens"


class FakeEngine:
    """Scheduler and fake worker with `depth` plans in flight, results collected per request."""

    def __init__(
        self,
        num_blocks=64,
        specs=None,
        depth=0,
        max_model_len=256,
        caching=True,
        connector=None,
        proposer="fixed",
        **kwargs,
    ) -> None:
        specs = specs or [spec()]
        config = KVCacheConfig(num_blocks, tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs)))
        self.kv = KVCacheManager(config, enable_caching=caching)
        kwargs = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **kwargs}
        transfers = KVTransfers([connector] if connector is not None else [])
        self.scheduler = Scheduler(self.kv, max_model_len=max_model_len, transfers=transfers, **kwargs)
        self.worker = FakeWorker(config, self.kv, max_model_len)
        self.worker.propose = PROPOSERS[proposer]
        self.worker.num_drafts = self.scheduler.num_drafts
        self.worker.finds = self.scheduler.drafts.finds
        self.plans: list[SchedulerOutput] = []
        self.unsampled: SchedulerOutput | None = None  # the newest plan, while its masks need what is in flight
        self.depth = depth
        self.in_flight: deque = deque()
        self.tokens: dict[str, list[int]] = {}
        self.pooled: dict[str, list[float]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.order: list[str] = []
        self.names: dict[int, str] = {}
        self.steps = 0

    def add(
        self,
        name,
        prompt,
        max_tokens=8,
        seed=0,
        priority=0,
        fork_of=None,
        salt=None,
        stop=(),
        eos=(),
        pooling: PoolingParams | None = None,
        output=(),
        features=(),
        **params,
    ) -> None:
        """`output`: tokens generated elsewhere, after which it goes on."""
        index = len(self.names)
        self.names[index] = name
        self.tokens[name] = []
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id=name,
                index=index,
                prompt_token_ids=np.asarray(prompt, np.int32),
                params=pooling
                or SamplingParams(temperature=1.0, max_tokens=max_tokens, stop_token_ids=list(stop), **params),
                eos_token_ids=tuple(eos),
                seed=seed,
                arrival_time=0.0,
                priority=priority,
                fork_of=fork_of,
                cache_salt=salt,
                output_token_ids=np.asarray(output, np.int32) if output else None,
                features=features,
                content_keys=tuple(ContentKey(f.start, f.stop, f.content_hash) for f in features),
            )
        )

    def abort(self, name) -> None:
        if self.scheduler.finish_requests([name]):
            self.finish[name] = FinishReason.ABORT

    def plan(self) -> SchedulerOutput | None:
        """Make one plan and run it; its results wait."""
        self.worker.shared = {block.id for block in self.kv.pool.blocks if block.ref > 1}
        plan = self.scheduler.schedule()
        if plan is not None:
            self.worker.verified = {}
            self.plans.append(plan)
            self.in_flight.append((plan, self.worker.run(plan)))
            self.unsampled = plan
            self._make_masks()
        return plan

    def _make_masks(self) -> None:
        """As soon as the host can, it must know the drafts that the worker verifies under grammars."""
        plan = self.unsampled
        found = self.scheduler.constrained_rows(plan) if plan is not None else None
        if plan is None or found is None:
            return
        self.unsampled = None
        first = np.cumsum([0, *(1 + count for count in self.worker._num_drafts(plan))])
        row_at = dict(zip(first.tolist(), plan.rows.tolist(), strict=False))
        for place, index in found.rows:
            assert self.scheduler.running.index[row_at[place]] == index
            assert found.drafts.get(index, []) == self.worker.verified[row_at[place]], "the host has other drafts"

    def land(self) -> None:
        """Apply the oldest results."""
        plan, output = self.in_flight.popleft()
        assert plan is not self.unsampled, "masks that wait for nothing"
        outputs = self.scheduler.update_from_output(plan, output)
        for i, index in enumerate(outputs.index):
            name = self.names[int(index)]
            self.tokens[name] += outputs.token_ids[outputs.offsets[i] : outputs.offsets[i + 1]].tolist()
            if i in outputs.pooled:
                self.pooled[name] = outputs.pooled[i].tolist()
            if outputs.finish[i]:
                self.finish[name] = FinishReason(outputs.finish[i])
                self.order.append(name)
        self._make_masks()

    def step(self) -> None:
        self.steps += 1
        while len(self.in_flight) <= self.depth and self.unsampled is None and self.plan() is not None:
            pass
        if self.in_flight:
            self.land()

    def run(self, limit=5000) -> None:
        while self.scheduler.has_unfinished() or self.in_flight:
            self.step()
            assert self.steps < limit, "no end in sight"

    def check_books(self) -> None:
        """Reference counts equal owners; free and held blocks are all blocks; only confirmed content can be found."""
        owners: dict[int, int] = {}
        holders = [*self.scheduler.requests.values(), *self.scheduler.transfers.sending.values()]
        for request in holders:
            for blocks in request.blocks:
                for block in blocks:
                    if block.id:
                        owners[block.id] = owners.get(block.id, 0) + 1
        pool = self.kv.pool
        for block in pool.blocks[1:]:
            assert block.ref == owners.get(block.id, 0), f"{block} has {owners.get(block.id, 0)} owners"
        free, node = [], pool._head.next
        while node is not pool._tail:
            free.append(node.id)
            node = node.next
        not_made = 1 + pool.num_blocks - len(pool.blocks)
        assert len(free) == len(set(free)) == pool.num_free - not_made
        assert pool.num_free + len(owners) == pool.num_blocks
        for key, block in pool._cached.items():
            assert block.key == key
        for request in self.scheduler.running.all():
            confirmed = int(self.scheduler.running.num_tokens[request.row])
            for group, blocks in zip(self.kv.groups, request.blocks, strict=True):
                for i, block in enumerate(blocks):
                    if block.key is not None:
                        assert (i + 1) * group.block_size <= confirmed, "unconfirmed tokens can be found"
