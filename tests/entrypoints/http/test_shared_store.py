"""The store of documents that outlive their requests: its limits, and who may read what."""

import asyncio

from quire.entrypoints.http.shared_store import (
    MAX_FOLLOWED_BYTES,
    OVERHEAD,
    Append,
    Delete,
    Follow,
    Get,
    Put,
    Result,
    SharedStore,
)

ME, YOU = b"me", b"you"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(store: SharedStore, id: str, size: int = 1, final: bool = True, owner: bytes = ME, new: bool = True) -> Result:
    return asyncio.run(store.call(Put(owner, id, b"x" * size, final, new)))


def found(store: SharedStore, *ids: str, owner: bytes = ME) -> str:
    return "".join(id for id in ids if asyncio.run(store.call(Get(owner, id))).done)


def test_a_full_store_drops_the_oldest_final_documents() -> None:
    store = SharedStore(3, 1 << 20, 60)
    for id in "abcd":
        assert put(store, id).done
    assert found(store, *"abcd") == "bcd"


def test_unfinished_documents_stay_and_leave_room() -> None:
    store = SharedStore(4, 1 << 20, 60)
    assert put(store, "a", final=False).done and put(store, "b", final=False).done
    refused = put(store, "c", final=False)
    assert refused.full and not refused.done and found(store, *"abc") == "ab"
    assert put(store, "a", owner=YOU, final=False).done  # another's, in what is left
    assert put(store, "b", owner=YOU, final=False).full
    for id in "cde":
        assert put(store, id).done
    assert found(store, *"abcde") == "abe"
    assert put(store, "a", new=False).done  # final now, and the newest
    assert put(store, "f").done and found(store, *"abef") == "abf"


def test_bytes_are_bounded_and_counted() -> None:
    store = SharedStore(100, 3 * (OVERHEAD + 1000), 60)
    for id in "abcd":
        assert put(store, id, 1000).done
    assert found(store, *"abcd") == "bcd" and store.used == 3 * (OVERHEAD + 1000)
    assert put(store, "huge", 10_000).full and found(store, *"abcd") == "bcd"
    for id in "bcd":
        assert asyncio.run(store.call(Delete(ME, id))).done
    assert store.used == 0 and len(store) == 0


def test_what_does_not_fit_drops_nothing() -> None:
    store = SharedStore(100, 4 * (OVERHEAD + 1000), 60)
    assert put(store, "running", 2000, final=False).done and put(store, "a", 100).done
    assert put(store, "b", 4000).full and found(store, "running", "a") == "runninga"


def test_whoever_has_most_makes_room() -> None:
    store = SharedStore(6, 1 << 20, 60)
    for id in "ab":
        assert put(store, id, owner=YOU).done
    for id in "abcdefgh":
        assert put(store, id).done
    assert found(store, *"abcdefgh") == "efgh" and found(store, *"ab", owner=YOU) == "ab"
    for id in "cde":  # until both have the same
        assert put(store, id, owner=YOU).done
    assert found(store, *"efgh") == "fgh" and found(store, *"abcde", owner=YOU) == "cde"


def test_one_client_does_not_push_out_others_with_large_documents_or_running_ones() -> None:
    store = SharedStore(100, 8 * (OVERHEAD + 1000), 60)
    assert put(store, "a", 1000, owner=YOU).done
    assert put(store, "running", 2000, final=False).done
    for id in "abcd":
        assert put(store, id, 3000).done
    assert put(store, "huge", 8000).full
    assert found(store, "a", owner=YOU) == "a" and found(store, "running", *"abcd") == "runningcd"


def test_documents_expire() -> None:
    clock = Clock()
    store = SharedStore(10, 1 << 20, 60, clock)
    put(store, "a")
    clock.now = 50
    put(store, "b")
    clock.now = 61
    assert found(store, *"ab") == "b"


def test_another_owner_sees_nothing() -> None:
    store = SharedStore(10, 1 << 20, 60)
    put(store, "a")
    assert not found(store, "a", owner=YOU)
    assert not asyncio.run(store.call(Delete(YOU, "a"))).done
    assert not put(store, "a", owner=YOU, new=False).done
    assert put(store, "a", owner=YOU).done and found(store, "a") == "a"


def test_a_final_document_stays_as_it_is() -> None:
    store = SharedStore(10, 1 << 20, 60)
    put(store, "a", 5)
    assert not put(store, "a", 7, new=False).done and not put(store, "a", 7).done
    assert len(asyncio.run(store.call(Get(ME, "a"))).data) == 5
    assert not put(store, "deleted", new=False).done


def test_whoever_follows_gets_every_event_once() -> None:
    async def follow(store: SharedStore) -> list[bytes]:
        events: list[bytes] = []
        while True:
            result = await store.call(Follow(ME, "a", len(events)))
            events += result.events
            if not result.events:
                assert result.final
                return events

    async def both() -> tuple[list[bytes], list[bytes]]:
        store = SharedStore(10, 1 << 20, 60)
        await store.call(Put(ME, "a", b"", False, True))
        early = asyncio.create_task(follow(store))
        for number in range(5):
            await asyncio.sleep(0)
            await store.call(Append(ME, "a", [b"%d" % number]))
        await store.call(Put(ME, "a", b"end", True, False))
        return await early, await follow(store)

    early, late = asyncio.run(both())
    assert early == late == [b"0", b"1", b"2", b"3", b"4"]


def test_events_come_in_parts() -> None:
    async def parts() -> list[list[bytes]]:
        store = SharedStore(10, 1 << 30, 60)
        await store.call(Put(ME, "a", b"", False, True))
        await store.call(Append(ME, "a", [b"x" * (MAX_FOLLOWED_BYTES // 2 + 1)] * 3 + [b"y" * 2 * MAX_FOLLOWED_BYTES]))
        await store.call(Put(ME, "a", b"", True, False))
        return [(await store.call(Follow(ME, "a", start))).events for start in range(5)]

    assert [[event[:1] for event in part] for part in asyncio.run(parts())] == [[b"x"], [b"x"], [b"x"], [b"y"], []]
