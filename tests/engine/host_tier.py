"""A worked example of a KV connector: blocks that the cache evicts are kept in host memory, and loaded for prompts that
match. One file and one registration.

It works on whole steps and in the order of plans: start_load_kv copies evicted blocks before the plan overwrites them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.distributed.kv_connector import KVConnector, register_connector
from quire.messages.kv_transfer import ConnectorMetadata


@dataclass
class Copies(ConnectorMetadata):
    saves: list[tuple[int, bytes]] = field(default_factory=list)  # (block, hash of its content)
    loads: list[tuple[int, bytes]] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)


class HostTier(KVConnector):
    def __init__(self, config, layout, role):
        super().__init__(config, layout, role)
        if len(layout.groups) != 1:
            raise ValueError(f"the host tier is for models with one KV-cache group, not {len(layout.groups)}")
        self.block_size = layout.groups[0].spec.block_size
        self.capacity = config.extra.get("max_blocks", 1000)
        self.held = OrderedDict()  # hashes, the oldest first
        self.copies = Copies()
        self.num_preempted = 0

    # The scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed):
        first = count = num_computed // self.block_size
        while count < len(request.block_hashes) and request.block_hashes[count] in self.held:
            count += 1
        return (count - first) * self.block_size, False

    def update_state_after_alloc(self, request, block_ids, num_external):
        # Blocks of the hit are not in the tier, or would be loaded with the same content.
        for block, block_hash in zip(block_ids[0], request.block_hashes, strict=False):
            if num_external and block_hash in self.held:
                self.copies.loads.append((block, block_hash))
                self.held.move_to_end(block_hash)

    def block_evicted(self, block_id, block_hash, group):
        if block_hash not in self.held:
            self.copies.saves.append((block_id, block_hash))
        self.held[block_hash] = None
        self.held.move_to_end(block_hash)

    def request_preempted(self, request, block_ids):
        self.num_preempted += 1  # its full blocks can be found in the cache, and are saved when evicted from there

    def reset_cache(self):
        self.copies.drops += self.held
        self.held.clear()

    def build_connector_meta(self, plan):
        while len(self.held) > self.capacity:
            self.copies.drops.append(self.held.popitem(last=False)[0])
        copies, self.copies = self.copies, Copies()
        copies.drops = [block_hash for block_hash in copies.drops if block_hash not in self.held]
        return copies if copies.saves or copies.loads or copies.drops else None

    # The worker's side

    def bind(self, kv_caches, notify):
        self.caches = [kv_caches[layer] for layer in self.layout.groups[0].layers]
        self.pages = {}

    def start_load_kv(self, meta):
        for block, block_hash in meta.saves:
            self.pages[block_hash] = [cache[block].cpu().clone() for cache in self.caches]
        for block, block_hash in meta.loads:
            for cache, page in zip(self.caches, self.pages[block_hash], strict=True):
                cache[block].copy_(page)
        for block_hash in meta.drops:
            self.pages.pop(block_hash, None)


register_connector("host", "tests.engine.host_tier:HostTier")
