"""The bugs that `make mutants` plants: where, what the code says, what it says with the bug, who should notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]


SCHEDULER, MANAGER = "quire/core/scheduler.py", "quire/core/kv_cache_manager.py"
POOL, GROUPS = "quire/core/block_pool.py", "quire/core/kv_groups.py"
QUEUE, ADMISSION = "quire/core/admission_queue.py", "quire/core/admission.py"
FORKS, TRANSFERS = "quire/core/forks.py", "quire/core/kv_transfers.py"
RESULTS, CORE = "quire/core/results.py", "quire/core/engine_core.py"
RATE, CONTEXT = "quire/entrypoints/http/rate_limit.py", "quire/entrypoints/http/context.py"
INPUT = "quire/engine/input_processor.py"
MASKS, WARPERS, THRESHOLD = "quire/sample/masks.py", "quire/sample/warpers.py", "quire/kernels/keep_threshold.py"
PENALTIES, VERIFICATION = "quire/sample/penalties.py", "quire/worker/verification.py"
GRAMMARS = "quire/structured_output/manager.py"
META, SIMPLIFY = "quire/structured_output/schema/metaschema.py", "quire/structured_output/schema/simplify.py"

REQUEST = "quire/core/request.py"

POOLING = ("tests/core/test_pooling.py",)
SCHEDULING = ("tests/core/test_scheduler.py",)
BLOCKS = ("tests/core/test_kv_groups.py", "tests/core/test_block_pool.py")
TRANSFERRING = ("tests/core/test_kv_transfers.py",)
HASHING = ("tests/core/test_hashing.py",)
ADMITTING = ("tests/entrypoints/http/test_admission.py",)
LIMITS = ("tests/entrypoints/openai/test_limits.py",)
RATES = ("tests/entrypoints/http/test_rate_limit.py",)
INPUTS = ("tests/engine/test_input_processor.py",)
SAMPLING = ("tests/sample/test_sampler.py",)
MASKING = ("tests/sample/test_processors.py",)
SCHEMAS = ("tests/structured_output/test_schemas.py",)
SIMPLER = ("tests/structured_output/test_simplify.py",)
DRAFTS, PLANNED_DRAFTS = ("tests/spec_decode/test_dependent_logits.py",), ("tests/core/test_drafts.py",)

MUTANTS = (
    # Once alive
    Mutant(RATE, "now - window.began >= self.interval", "False", RATES),
    Mutant(
        CONTEXT,
        "waiting + max(0, num_sequences - free) > limit",
        "waiting + max(0, num_sequences - free) > limit + 1",
        ADMITTING,
    ),
    Mutant(
        CONTEXT,
        "waiting + max(0, num_sequences - free) > limit",
        "waiting + max(0, num_sequences - free) >= limit > 0",
        ADMITTING,
    ),
    Mutant(QUEUE, "        self.blocked.discard(request)\n", "", SCHEDULING),
    Mutant(
        SCHEDULER,
        "found in the cache.\n            self.reset_prefix_cache()\n",
        "found in the cache.\n            pass\n",
        SCHEDULING,
    ),
    Mutant(
        GROUPS,
        "np.maximum(next_query - self.window + 1, 0)",
        "np.maximum(next_query - self.window + 1 - self.block_size, 0)",
        SCHEDULING,
    ),
    Mutant(MANAGER, "self.pool.free(reversed(blocks))", "self.pool.free(list(blocks))", BLOCKS),
    Mutant(WARPERS, "chosen < least.unsqueeze(1)", "chosen <= least.unsqueeze(1)", SAMPLING),
    Mutant(WARPERS, "logits < least, -torch.inf", "logits <= least, -torch.inf", SAMPLING),
    Mutant(MASKS, " & (lengths <= position)", "", MASKING),
    # Core
    Mutant(ADMISSION, "        if request.num_cached >= 0:\n", "        if False:\n", SCHEDULING),
    Mutant(MANAGER, "self.prefix_hits += hit.num_tokens", "self.prefix_hits += num_tokens", SCHEDULING),
    Mutant(
        RESULTS,
        "if (run.num_pending[rows] > 1).any():",
        "if (run.num_pending[rows] > 2).any():",
        ("tests/structured_output/test_engine.py",),
    ),
    Mutant(RESULTS, "lengths >= run.token_limit[rows]", "lengths > run.token_limit[rows]", SCHEDULING),
    Mutant(QUEUE, "        request.frames_to_discard -= 1\n", "", SCHEDULING),
    Mutant(QUEUE, "any(preempted.key < request.key for preempted in self._draining)", "False", SCHEDULING),
    Mutant(
        SCHEDULER,
        "threshold = long_prefill_token_threshold if chunked_prefill else 0",
        "threshold = long_prefill_token_threshold",
        SCHEDULING,
    ),
    Mutant(SCHEDULER, "core.priority if self.by_priority else 0", "0", SCHEDULING),
    Mutant(QUEUE, "== 0 and request in self._draining", "== 0", ("tests/core/test_admission_queue.py",)),
    Mutant(
        FORKS,
        "count >= request.num_prompt_tokens",
        "count >= request.num_prompt_tokens - 1",
        ("tests/core/test_forks.py",),
    ),
    Mutant(TRANSFERS, "if count > best.num_tokens:", "if count >= best.num_tokens:", TRANSFERRING),
    Mutant(TRANSFERS, 'keepers = {("load", loader)} if loader is not None else set()', "keepers = set()", TRANSFERRING),
    Mutant(MANAGER, "self._longest_hit(hashes, num_tokens - 1)", "self._longest_hit(hashes, num_tokens)", BLOCKS),
    Mutant(MANAGER, "0 if group.window is not None else _common_length", "_common_length", SCHEDULING + BLOCKS),
    Mutant(MANAGER, "self.alignment = math.lcm(*sizes)", "self.alignment = max(sizes)", BLOCKS),
    Mutant(POOL, "if block.key is not None or key in self._cached:", "if block.key is not None:", BLOCKS),
    Mutant(
        POOL,
        "if block.key is None:\n                    self._link(self._head, block)",
        "if False:\n                    self._link(self._head, block)",
        BLOCKS,
    ),
    Mutant(POOL, "sum(b.ref == 0 and b is not self.null_block", "sum(b is not self.null_block", SCHEDULING + BLOCKS),
    Mutant(
        GROUPS,
        "max(0, next_query - self.window + 1) // self.block_size",
        "max(0, next_query - self.window + 2) // self.block_size",
        SCHEDULING + BLOCKS,
    ),
    Mutant(GROUPS, "    found_by_same_plan = False\n", "", SCHEDULING + BLOCKS),
    Mutant(GROUPS, "return num_tokens % self.block_size == 0", "return True", BLOCKS),
    Mutant(CORE, '        f"quantization {model.quantization}",\n', "", HASHING),
    Mutant(CORE, "model.max_model_len or model.derived_max_model_len}", "model.derived_max_model_len}", HASHING),
    Mutant(CORE, 'if chooses_by_length else ""', 'if True else ""', HASHING),
    Mutant(REQUEST, "return bool(pooling.skip_reading_prefix_cache)", "return False", POOLING),
    Mutant(RESULTS, "live & pooled", "pooled", POOLING),
    # Engine
    Mutant(INPUT, "else self.max_model_len - 1", "else self.max_model_len", INPUTS),
    Mutant(INPUT, "else token_ids[-keep:]", "else token_ids[:keep]", INPUTS),
    Mutant(INPUT, "parsed = dataclasses.replace(parsed, token_ids=kept)", "parsed.token_ids = kept", INPUTS),
    Mutant(INPUT, "self._count += request.sampling.n", "self._count += 1", INPUTS),
    # Entrypoints
    Mutant(RATE, "used + more > limit", "used + more >= limit", RATES),
    Mutant(RATE, "window.requests += count", "window.requests += 1", RATES),
    Mutant(RATE, "window.began + self.interval - self.clock()", "self.interval", RATES),
    Mutant(CONTEXT, "if num_sequences > slots + limit:", "if num_sequences > slots + limit + 1:", ADMITTING),
    Mutant(CONTEXT, "max(self.engine.stats.num_waiting, unfinished - slots)", "unfinished - slots", ADMITTING),
    Mutant(CONTEXT, "            self._num_sequences -= num_sequences\n", "", ADMITTING),
    Mutant("quire/entrypoints/openai/completions.py", "if len(given) > most:", "if len(given) > 1024:", LIMITS),
    # Sample
    Mutant(
        THRESHOLD, "(cumulative < top_p.unsqueeze(1)).sum(1)", "(cumulative < top_p.unsqueeze(1)).sum(1) + 1", SAMPLING
    ),
    Mutant(THRESHOLD, " & ~ties)", ")", SAMPLING),
    Mutant(THRESHOLD, "top_k.clamp(1, count) - 1", "top_k.clamp(1, count)", SAMPLING),
    Mutant(MASKS, "batch.positions[i] < first_allowed", "batch.positions[i] <= first_allowed", MASKING),
    Mutant(MASKS, "logits[i] = -torch.inf\n", "pass\n", MASKING),
    # Structured output
    Mutant(META, "value >= 0 and value == int(value)", "value >= 0", SCHEMAS),
    Mutant(META, "_is_number(value) and value > 0", "_is_number(value)", SCHEMAS),
    Mutant(META, "if fault := schema_fault(part):", "if False and (fault := schema_fault(part)):", SCHEMAS),
    Mutant(SIMPLIFY, 'max(least, schema.get("minItems", 0))', "least", SIMPLER),
    Mutant(SIMPLIFY, 'schema.get("maxItems", 2) in (0, 1)', 'schema.get("maxItems", 2) in (0, 1, 2)', SIMPLER),
    Mutant(SIMPLIFY, 'met = "then" if schema["if"] else "else"', 'met = "else" if schema["if"] else "then"', SIMPLER),
    # Drafts of rows whose logits depend on tokens before
    Mutant(PENALTIES, "drafts = _drafts_ahead(places, batch)", "drafts = None", DRAFTS),
    Mutant(PENALTIES, "accumulate=True", "accumulate=False", DRAFTS),
    Mutant(VERIFICATION, "batch.done = offset_ < num_sampled", "batch.done = offset_ <= num_sampled", DRAFTS),
    Mutant(GRAMMARS, "constrained.num_tokens + ahead, row", "constrained.num_tokens, row", DRAFTS),
    Mutant(RESULTS, "((counts > 0) & (run.num_frames[rows] > 1)).any()", "False", PLANNED_DRAFTS),
    Mutant(RESULTS, "first[places].tolist(), index", "places.tolist(), index", PLANNED_DRAFTS),
)
