"""The worked examples of the documents that specify the system, with their numbers.

Our block ids are one higher: the null block is id 0 and not counted. Where a document hashes a partial block, we do
not: only full blocks can be found.
"""

from tests.core.fake_engine import FakeEngine, spec


def test_block_allocation_with_eight_blocks():
    """Block size 16, 8 blocks; A has 40 tokens, B 24, C 48, the first 16 the same; A then grows to 50."""
    common = [1] * 16
    engine = FakeEngine(num_blocks=8, specs=[spec(16)], max_num_batched_tokens=64)
    blocks = lambda name: [b.id - 1 for b in engine.scheduler.requests[name].blocks[0]]  # noqa: E731
    free = lambda: engine.kv.pool.num_free  # noqa: E731
    refs = lambda name: [b.ref for b in engine.scheduler.requests[name].blocks[0]]  # noqa: E731

    engine.add("A", common + list(range(24)), max_tokens=30)
    engine.step()
    assert blocks("A") == [0, 1, 2] and free() == 5 and refs("A") == [1, 1, 1]

    engine.add("B", common + [2] * 8, max_tokens=1)
    engine.plan()  # B is planned; A decodes beside it
    assert blocks("B") == [0, 3] and free() == 4 and refs("B") == [2, 1]
    engine.land()

    # The document keeps B without letting it generate; here it ended after one token, so hold its blocks' count aside.
    assert "B" not in engine.scheduler.requests and free() == 5
    while len(engine.tokens["A"]) < 10:
        engine.step()
    engine.plan()  # A's 50th token needs a fourth block
    assert len(blocks("A")) == 4 and free() == 4

    engine.add("C", common + [3] * 32, max_tokens=1)
    engine.plan()
    assert blocks("C")[0] == 0 and len(blocks("C")) == 3 and refs("C") == [2, 1, 1]
    assert free() == 2  # the document's 1, and B's own block that came back


def test_scheduling_simulation():
    """max_num_seqs 4, 4,096 tokens a step, 512 blocks of 16; A (2,048), B (512) and C (3,072) arrive a step apart."""
    engine = FakeEngine(
        num_blocks=512, specs=[spec(16)], max_num_seqs=4, max_num_batched_tokens=4096, max_model_len=4096
    )
    free = lambda: engine.kv.pool.num_free  # noqa: E731

    def step():
        plan = engine.plan()
        after_planning = free()
        engine.land()
        return dict(zip(names(plan), plan.num_tokens.tolist(), strict=True)), after_planning

    def names(plan):
        return [engine.scheduler.running.requests[row].request_id for row in plan.rows]

    engine.add("A", range(2048), max_tokens=100)
    assert step() == ({"A": 2048}, 384)
    engine.add("B", range(10_000, 10_512), max_tokens=100)
    # The document counts 352 free. A's first generated token is its 2,049th and needs a 129th block, which it forgets.
    assert step() == ({"A": 1, "B": 512}, 351)
    engine.add("C", range(20_000, 23_072), max_tokens=100)
    # Likewise B's 513th token: 160 in the document.
    assert step() == ({"A": 1, "B": 1, "C": 3072}, 158)
    assert step()[0] == {"A": 1, "B": 1, "C": 1}


def test_prefix_caching_saves_288_of_320_blocks():
    """A system prompt of 512 tokens, ten requests, block size 16."""
    system = [7] * 512

    def blocks_in_use(caching):
        engine = FakeEngine(
            num_blocks=1000, specs=[spec(16)], max_num_batched_tokens=8192, max_model_len=1024, caching=caching
        )
        for i in range(10):
            engine.add(f"r{i}", [*system, i], max_tokens=4)
        engine.plan()
        used = 1000 - engine.kv.pool.num_free - 10  # each request's own query is one block
        shared = engine.scheduler.requests["r0"].blocks[0][0].ref
        engine.land()
        return used, shared

    assert blocks_in_use(caching=False) == (320, 1)
    assert blocks_in_use(caching=True) == (32, 10)
