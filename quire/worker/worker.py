"""One device: loads the model, sizes and holds the KV cache, runs steps."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.attention.base import GroupFeatures
from quire.attention.cache_format import cache_format
from quire.attention.group_backends import GroupBackends
from quire.attention.selector import choose_backends
from quire.checkpoint.identity import checkpoint_identity
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.resolve import resolve_model
from quire.config import EngineConfig
from quire.distributed.kv_connector import make_connectors
from quire.distributed.world import SINGLE_WORLD, World
from quire.features.store import feature_support
from quire.kernels import native
from quire.kernels.native.ready_memory import make_ready
from quire.layers.cache_layer import CacheLayer
from quire.layers.parallel import TensorParallel
from quire.layers.stage_link import check_stages, link_stages
from quire.lora.adapters import Adapters
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import DraftNeeds, KVCacheConfig, KVCacheGroup, KVCacheSpec, make_groups, shared_page_bytes
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.speculation import DraftProfile
from quire.models.base import LanguageModel, SupportsLoRA
from quire.models.batch_invariant import check_invariant, invariant_backend, make_invariant
from quire.models.decoder import DecoderModel
from quire.models.loading.kv_scales import use_checkpoint_scales
from quire.models.loading.loader import load_model
from quire.models.loading.peft import read_adapter
from quire.models.loading.sharded_state import save_sharded_state
from quire.models.registry import ModelRegistry
from quire.models.stage import Stage
from quire.platforms import current_platform
from quire.plugins import load_plugins
from quire.pooling.heads import load_heads
from quire.sample.user_processors import make_processors, processor_classes
from quire.sleep_mode.memory import KV_CACHE, WEIGHTS
from quire.sleep_mode.sleep import make_sleep_mode
from quire.spec_decode.proposer import Proposer, make_proposer
from quire.spec_decode.step_costs import measure_step_costs
from quire.weights.updates import WeightUpdates
from quire.worker.kv_transfers import WorkerTransfers
from quire.worker.memory import DeviceMemory, kv_cache_budget, measure_steps, state_memory
from quire.worker.model_runner import ModelRunner
from quire.worker.profiler import TorchProfiler
from quire.worker.recovery import Recovery
from quire.worker.transfer import Pending

logger = logging.getLogger("quire")


class Worker:
    """A rank of a world: it alone knows which; layers get a TensorParallel object."""

    def __init__(self, config: EngineConfig, world: World = SINGLE_WORLD) -> None:
        self.config = config
        self.world, self.rank = world, world.rank
        check_stages(config, world)
        load_plugins()
        for architecture, target in (config.model.model_class_overrides or {}).items():
            ModelRegistry.register_model(architecture, target)
        checkpoint = resolve_model(
            config.model.model,
            load_format=config.load.load_format,
            revision=config.model.revision,
            download_dir=config.load.download_dir,
            remote_code=config.model.trust_remote_code,
            ignore_patterns=config.load.ignore_patterns,
        )
        self.checkpoint = checkpoint
        strategy = config.load.safetensors_load_strategy
        reads = checkpoint.format != "dummy" and world.local_rank == 0  # ranks of a machine share what is read ahead
        if reads and not config.load.packed_weights_cache and strategy != "lazy":
            read_ahead(checkpoint.files, wait=strategy == "eager")  # with packed weights it may not be read at all
        device = config.device
        self.platform = current_platform(device.device, device.cpu_threads, device.cpu_pin, world.local_rank)
        for note in self.platform.prepare():
            logger.info(note)
        self.invariant = device.batch_invariant and self.platform.supports_triton  # a CPU is by itself
        if self.invariant:
            check_invariant(config)
            world.tensor.sum_in_order()
        own_memory = self.platform.has_own_memory
        self.memory_before = DeviceMemory.measure(self.platform.device) if own_memory else None
        classes = processor_classes(config.model.logits_processors) if world.answers else []
        processors = make_processors(classes, config, self.platform.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.platform.check_dtype(self.dtype)
        kept = (config.cache.kv_cache_dtype, config.model.hf_config)
        self.cache_format = cache_format(self.platform, self.dtype, *kept)  # before loading, which takes long
        load = functools.partial(
            load_model,
            hf_config=config.model.hf_config,
            dtype=self.dtype,
            device=self.platform.device,
            tp=self.tensor_parallel(),
            max_model_len=config.model.max_model_len,
            quantization=config.model.quantization,
            model_impl=config.model.model_impl,
            trust_remote_code=config.model.trust_remote_code,
            code_revision=config.model.code_revision,
            moe_backend=device.moe_backend,
            longest=config.model.derived_max_model_len,
            threads=config.load.load_threads,
            state_pattern=config.load.sharded_state_pattern,
            stage=Stage(world.stage, world.layout.stages, config.parallel.pipeline_layers),
            backbone=config.pooling.setup is not None,
        )
        self.sleep_mode = make_sleep_mode(config.model.enable_sleep_mode, self.platform.device)
        with self.sleep_mode.allocating(WEIGHTS):
            self.model = load(
                checkpoint,
                progress=config.load.use_tqdm_on_load,
                packed_weights_cache=config.load.packed_weights_cache,
            )
        if self.invariant:
            make_invariant(self.model)
        self.weights = WeightUpdates(
            self.model,
            checkpoint,
            load,
            config.weight_transfer,
            self.platform.device,
            world.rank,
            "it pools" if config.pooling.setup is not None else None,
        )
        self._check_length()
        self.proposer = self._make_proposer()
        self.cache_layers = self._number_cache_layers()
        # After loading: the threads that it starts would all inherit this one's core.
        self.pinned = native.pin_threads(self.platform.cores_to_pin())
        assert config.scheduler.max_num_seqs is not None
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.adapters = self._make_adapters()
        if self.cache_format.has_layer_scales:
            use_checkpoint_scales(self.cache_layers)
        backends = self._choose_backends(make_groups(self.kv_cache_specs()))
        self.runner = ModelRunner(
            self.model,
            backends,
            self.platform.device,
            config.model.vocab_size,
            config.model.logprobs_mode,
            use_graphs=backends.supports_graphs and self._is_capturable(),
            processors=processors,
            proposer=self.proposer,
            num_drafts=config.speculative.num_drafts,
            lora=self.adapters.state if self.adapters is not None else None,
            graph_sizes=device.cudagraph_capture_sizes,
            largest_graph=device.max_cudagraph_capture_size,
            share_prefixes=not (device.disable_cascade_attn or self.invariant),
            tensor=world.tensor,
            stages=link_stages(config, world, self.model, self.dtype, self.platform.device),
            heads=load_heads(config, checkpoint, self.model, self.platform.device),
            cache_memory=functools.partial(self.sleep_mode.allocating, KV_CACHE),
        )
        self.sleep_mode.holds(self.weights.reloadable, self.weights.others, lambda: self.runner.kv_tensors)
        self.draft_profile = DraftProfile()
        self.profiler = TorchProfiler(config.observability.profiler_config, world.rank)
        self.recovery = Recovery(self.platform.device, self.runner.recover)

    def _is_capturable(self) -> bool:
        return self.model.capturable and self.world.tensor.capturable and not self.config.device.enforce_eager

    def tensor_parallel(self) -> TensorParallel:
        """This worker's part in the layers."""
        group = self.world.tensor
        return TensorParallel(group.rank, group.size, group)

    def _make_adapters(self) -> Adapters | None:
        config, max_tokens = self.config, self.config.scheduler.max_num_batched_tokens
        if not config.lora.enable_lora:
            return None
        if not isinstance(self.model, SupportsLoRA):
            raise ValueError(f"LoRA is not available yet for {type(self.model).__name__}; leave out enable_lora")
        assert isinstance(self.model, torch.nn.Module)
        assert max_tokens is not None
        most = max(max_tokens, self.max_num_seqs * (1 + config.speculative.num_drafts))
        if not self.model.cache_layers():  # texts are computed whole
            most = max(most, config.model.max_model_len or config.model.derived_max_model_len)
        names = self.model.adapted_names()
        read = functools.partial(
            read_adapter,
            names=names,
            dtype=self.dtype,
            elsewhere=self.model.is_elsewhere,
            beside_steps=not self.platform.launches_async,
        )
        return Adapters(
            self.model,
            read,
            names.checkpoint_name,
            config.lora,
            self.max_num_seqs,
            most,
            self.dtype,
            self.platform.device,
        )

    def _make_proposer(self) -> Proposer | None:
        proposer = make_proposer(self.config, self.platform.device) if self.world.is_last_stage else None
        if proposer is not None:
            proposer.tp = self.tensor_parallel()
            proposer.prepare(self.model)
            if proposer.hidden_outputs and not isinstance(self.model, DecoderModel):
                raise ValueError(
                    f"speculative_config: method {self.config.speculative.method!r} reads hidden states, which "
                    f"{type(self.model).__name__} does not give; use 'ngram', 'suffix' or a draft model"
                )
        return proposer

    def load_adapter(self, request: LoRARequest) -> None:
        self._require_adapters().load(request)

    def place_adapter(self, lora_id: int, slot: int) -> None:
        self._require_adapters().place(lora_id, slot)

    def use_adapter(self, lora_id: int, slot: int) -> None:
        self._require_adapters().use(lora_id, slot)

    def drop_adapter(self, lora_id: int) -> None:
        self._require_adapters().drop(lora_id)

    def adapter_news(self) -> list[AdapterNews]:
        return self._require_adapters().news()

    def _require_adapters(self) -> Adapters:
        if self.adapters is None:
            raise ValueError("the engine was started without room for adapters (--enable-lora)")
        return self.adapters

    def _number_cache_layers(self) -> list[CacheLayer]:
        """The model's and, with indices after theirs, the proposer's."""
        layers = list(self.model.cache_layers())
        if self.proposer is not None:
            first = 1 + max((layer.layer_index for layer in layers), default=-1)
            for index, layer in enumerate(self.proposer.cache_layers(), first):
                layer.layer_index = index
                layers.append(layer)
        return layers

    def draft_needs(self) -> DraftNeeds:
        return DraftNeeds() if self.proposer is None else self.proposer.needs

    def _choose_backends(self, groups: tuple[KVCacheGroup, ...]) -> GroupBackends:
        layers = {layer.layer_index: layer for layer in self.cache_layers}
        # Where drafts are verified, each of a row's tokens is attended to as a row.
        max_rows = self.max_num_seqs * (1 + self.config.speculative.num_drafts)
        page = shared_page_bytes(groups)
        needs = [
            GroupFeatures(
                shapes=tuple(layers[i].shape for i in group.layers or layers),  # no layers: those of other stages
                max_rows=max_rows,
                causal=all(layers[i].causal for i in group.layers),
                padded=group.spec.page_bytes != page,
            )
            for group in groups
        ]
        pairs = [(group.spec, features) for group, features in zip(groups, needs, strict=True)]
        requested = self.config.device.attention_backend
        requested = invariant_backend(requested) if self.invariant else requested
        choice = choose_backends(self.platform, self.dtype, pairs, requested)
        for reason in choice.reasons:
            logger.debug(reason)
        return GroupBackends(choice.by_group)

    def _check_length(self) -> None:
        model = self.config.model
        length, max_positions = model.max_model_len or model.derived_max_model_len, self.model.max_positions
        if max_positions is not None and length > max_positions:
            raise ValueError(
                f"sequences may be {length} tokens long, but the model has positions for {max_positions}; "
                f"use at most that (--max-model-len {max_positions})"
            )

    def feature_support(self) -> FeatureSupport | None:
        return feature_support(self.model) if self.world.layout.stages == 1 else None

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        size = self.config.cache.block_size
        layers, kept = self.cache_layers, self.cache_format
        specs = {layer.layer_index: layer.kv_cache_spec(size, kept.dtype) for layer in layers}
        return {i: spec.with_scales("float32") for i, spec in specs.items()} if kept.by_token else specs

    def kv_cache_memory(self) -> int:
        """Measured after the weights are loaded."""
        cache = self.config.cache
        if not self.platform.has_own_memory:
            # The pages of a mapped file count as available memory, but every step reads them.
            available = max(0, self.platform.available_memory() - getattr(self.model, "mapped_bytes", 0))
            return int(available * cache.cpu_memory_utilization)
        max_tokens = self.config.scheduler.max_num_batched_tokens
        assert max_tokens is not None
        specs = self.kv_cache_specs()
        reserved, now = measure_steps(self.runner, specs, self.max_num_seqs, max_tokens)
        assert self.memory_before is not None
        budget = kv_cache_budget(self.memory_before, now, cache.gpu_memory_utilization, reserved)
        model = self.config.model
        longest = model.max_model_len or model.derived_max_model_len
        pages = self.runner.backends.pages_per_block(make_groups(specs))
        budget -= self._encoder_cache_bytes()
        return budget - state_memory(specs, self.max_num_seqs, longest, model.vocab_size, budget, pages)

    def _encoder_cache_bytes(self) -> int:
        support = self.feature_support()
        if support is None or not support.kinds:
            return 0
        return self.config.scheduler.encoder_tokens * support.hidden_size * self.dtype.itemsize

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        if self.world.layout.stages > 1:
            config = config.part_of(self.kv_cache_specs())
            self.runner.backends = self._choose_backends(config.groups)
        self.runner.initialize(config, self.max_num_seqs, max_model_len)
        max_tokens = self.config.scheduler.max_num_batched_tokens
        assert max_tokens is not None
        self.runner.capture_graphs(max_tokens)
        if self.runner.proposer is not None and self.config.speculative.adaptive:
            self.draft_profile = self._measure_drafts(self.runner.proposer, max_tokens)
        connectors = make_connectors(self.config.transfer, config, "worker", self.world.rank)
        if connectors:  # after the steps that no one has asked for
            self.runner.bind_connectors(WorkerTransfers(connectors), on_transfer)

    def make_memory_ready(self) -> None:
        """Of the KV cache, in the background; not in sleep mode, which gives memory back."""
        if not self.config.model.enable_sleep_mode:
            self.ready_memory = make_ready(self.runner.kv_tensors, self.platform.available_memory)

    def weights_identity(self) -> str:
        """Tells models apart by what their files hold."""
        return checkpoint_identity(self.checkpoint)

    def close_connectors(self) -> None:
        if self.runner.transfers is not None:
            self.runner.transfers.close()

    def _measure_drafts(self, proposer: Proposer, max_tokens: int) -> DraftProfile:
        rests = proposer.finds or proposer.rests  # one that looks texts up has nothing to keep
        if self.world.layout.stages > 1:  # whose steps overlap
            return DraftProfile(proposer.finds, rests)

        def submit(plan: SchedulerOutput) -> Callable[[], object]:
            self.runner.execute_model(plan)
            return self.runner.sample_tokens().result

        # Only captured steps are planned, if there are any: others take several times as long.
        captured = self.runner.graphs.tokens_per_row if self.runner.graphs is not None else []
        sizes = tuple(count - 1 for count in captured if count > 1)
        counts = (self.max_num_seqs, len(self.runner.block_sizes), self.runner.num_drafts)
        fewest, warm_up = min(sizes, default=1), self.platform.has_own_memory
        plain, drafted = measure_step_costs(submit, *counts, max_tokens, fewest, warm_up, in_step=self.world.size > 1)
        return DraftProfile(proposer.finds, rests, sizes, plain, drafted)

    def get_draft_profile(self) -> DraftProfile:
        return self.draft_profile

    def execute_model(self, plan: SchedulerOutput) -> None:
        try:
            self.runner.execute_model(plan)
        except Exception as error:
            self.recovery.after(error)
            raise

    def sample_tokens(self, grammar: GrammarMask | None = None) -> Pending[ModelRunnerOutput]:
        try:
            pending = self.runner.sample_tokens(grammar)
        except Exception as error:
            self.recovery.after(error)
            raise
        pending.on_failure = self.recovery.probe
        return pending

    @property
    def num_exchanges(self) -> int:
        """Launched with the ranks that share its layers: those that differ in it are at different places of a step."""
        graphs = self.runner.graphs
        calls = sum(count.calls for count in self.world.tensor.counts.values())
        return calls + (graphs.num_replays if graphs is not None else 0)

    @property
    def model_runner(self) -> ModelRunner:
        return self.runner

    def get_model(self) -> LanguageModel:
        """For users' functions: this and `model_runner` are vLLM's names."""
        return self.model

    def sleep(self, level: int) -> None:
        self.sleep_mode.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        self.sleep_mode.wake(tags)

    def discard_kv_cache(self) -> None:
        self.sleep_mode.discard_cache()

    def update_weights(self, step: str, info: Any = None) -> None:
        """A step of an update; see WeightUpdates."""
        self.weights.call(step, info)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        if self.config.pooling.setup is not None:
            raise ValueError("sharded state has no heads for pooling; only models that generate can be saved so")
        if self.weights.updated:
            raise ValueError("the engine has new weights since its start; sharded state is saved of a checkpoint's")
        save_sharded_state(self.model, self.checkpoint, path, pattern, max_size)

    def start_profile(self, prefix: str | None = None) -> None:
        self.profiler.start(prefix)

    def stop_profile(self) -> str | None:
        return self.profiler.stop()

    def describe(self) -> str:
        count = self.model.num_parameters
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
        if self.platform.supports_native:
            threads = f"{torch.get_num_threads()} threads{' pinned' if self.pinned else ''}"
            place = f"{self.platform.name}: {native.describe()}, {threads}"
        else:
            place = torch.cuda.get_device_name(self.platform.device)
        cache = f", {self.cache_format.name} KV cache" if self.cache_format.name else ""
        return f"{size} parameters · {self.config.model.dtype} · {place}, {self.runner.backends.name} attention{cache}"
