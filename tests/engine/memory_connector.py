"""KV connectors that keep finished requests' prompt blocks in memory, for other engines of this process to load."""

import threading
from dataclasses import dataclass, field

import torch

from quire.distributed.kv_connector import KVConnector
from quire.messages.kv_transfer import ConnectorMetadata, FinishedTransfers


@dataclass
class Meta(ConnectorMetadata):
    loads: list[tuple[int, bytes]] = field(default_factory=list)  # (block id, hash)
    saves: list[tuple[int, bytes]] = field(default_factory=list)
    receives: list[str] = field(default_factory=list)  # requests that wait for their loads
    sends: list[str] = field(default_factory=list)  # requests whose blocks are kept until saved


class MemoryConnector(KVConnector):
    """Blocks are of one group; saving takes a step, so blocks of finished requests are kept until then."""

    store: dict[bytes, list[torch.Tensor]] = {}  # noqa: RUF012 - shared on purpose: it stands for the network
    by_layer = True
    loads_async = False
    layer_calls: list[tuple[str, int]] = []  # noqa: RUF012

    def __init__(self, config, layout, role):
        super().__init__(config, layout, role)
        self.block_size = layout.groups[0].spec.block_size
        self.meta = Meta()
        self.done = FinishedTransfers()

    def get_num_new_matched_tokens(self, request, num_computed):
        first = count = num_computed // self.block_size
        while count < len(request.block_hashes) and request.block_hashes[count] in self.store:
            count += 1
        return (count - first) * self.block_size, self.loads_async

    def update_state_after_alloc(self, request, block_ids, num_external):
        if not num_external:
            return
        held = [i for i in range(len(block_ids[0])) if i < len(request.block_hashes)]
        stop = min(len(held), -(-request.num_prompt_tokens // self.block_size))
        for i in range(stop):
            if request.block_hashes[i] in self.store:
                self.meta.loads.append((block_ids[0][i], request.block_hashes[i]))
        if self.loads_async:
            self.meta.receives.append(request.request_id)

    def build_connector_meta(self, plan):
        meta, self.meta = self.meta, Meta()
        return meta

    def request_finished(self, request, block_ids):
        full = min(request.num_prompt_tokens, request.num_computed) // self.block_size
        self.meta.saves += [(block_ids[0][i], request.block_hashes[i]) for i in range(full)]
        self.meta.sends.append(request.request_id)
        return True

    def bind(self, kv_caches, notify):
        self.caches = [kv_caches[layer] for layer in sorted(kv_caches)]
        self.notify = notify

    def start_load_kv(self, meta):
        for block, key in meta.loads:
            for cache, page in zip(self.caches, self.store[key], strict=True):
                cache[block] = page
        for block, key in meta.saves:
            self.store[key] = [cache[block].clone() for cache in self.caches]
        self.done = FinishedTransfers(tuple(meta.sends), tuple(meta.receives))

    def wait_for_layer_load(self, layer):
        self.layer_calls.append(("load", layer))

    def save_kv_layer(self, layer, kv_cache):
        self.layer_calls.append(("save", layer))

    def get_finished(self):
        done, self.done = self.done, FinishedTransfers()
        return done


class AsyncMemoryConnector(MemoryConnector):
    loads_async = True


class ThreadedConnector(AsyncMemoryConnector):
    """Transfers happen in a thread, once `gate` is open."""

    by_layer = False
    gate = threading.Event()

    def start_load_kv(self, meta):
        if meta.loads or meta.saves or meta.sends:
            threading.Thread(target=self._transfer, args=(meta,), daemon=True).start()

    def _transfer(self, meta):
        self.gate.wait()
        super().start_load_kv(meta)
        self.notify()
