# The native module, as rust/py/src/lib.rs exports it; checked by mypy.stubtest in `make lint`.
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor
from typing_extensions import Self, disjoint_base

__all__ = [
    "AmaxSlots",
    "AutocastRegion",
    "Buffers",
    "CurrentRegion",
    "CutCall",
    "CutSaved",
    "Dispatcher",
    "HeldRegion",
    "ObservedLaunches",
    "OptimizerWrites",
    "Program",
    "ProgramSaved",
    "ProgramSteps",
    "QuantizedValue",
    "Recipe",
    "RepeatedAttention",
    "RepeatedCall",
    "RepeatedLaunches",
    "Snapshot",
    "TracedCall",
    "WeightHandle",
    "activation",
    "activation_backward",
    "activation_groups",
    "amax",
    "amax_mark_all_ran",
    "amax_participants",
    "are_as_found",
    "are_called_plainly",
    "autocast_callbacks",
    "autocast_enter_phase",
    "autocast_held",
    "autocast_is_of_factory",
    "autocast_leave_phase",
    "autocast_objects",
    "autocast_phase_thread",
    "autocast_region",
    "autocast_reset",
    "autocast_set",
    "autocast_set_depth",
    "autocast_set_first",
    "autocast_take_first",
    "counters",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_part",
    "cublas_multiplies_groups",
    "cuda_driver_version",
    "cut_apply",
    "cut_autograd_forward",
    "cut_backward",
    "delayed_callbacks",
    "dequantize",
    "device_facts",
    "gemm",
    "grouped_gemm",
    "grouped_layer_call",
    "grouped_layer_forward",
    "grouped_layer_straight",
    "install_hooks",
    "install_tensors",
    "instance_method",
    "inventory",
    "join_rotated",
    "layer_call",
    "layer_forward",
    "learns_launches",
    "load_kernels",
    "moe_apply",
    "moe_dropped",
    "moe_map",
    "moe_pad",
    "moe_pad_list",
    "moe_padded_splits",
    "moe_permute",
    "moe_permute_cast",
    "moe_unpermute",
    "moe_unpermute_backward",
    "new_stream",
    "norm",
    "norm_backward",
    "note_scale_change",
    "observe_launches",
    "plain_arguments",
    "program_apply",
    "program_autograd_forward",
    "program_backward",
    "program_backward_dw",
    "program_grads_of_nothing",
    "program_module_call",
    "program_run_backward",
    "program_run_forward",
    "quantize",
    "quantize_groups",
    "quantize_whole",
    "record",
    "recorded",
    "release_memory",
    "repeat_launches",
    "requantize",
    "reset_counters",
    "rotate",
    "router_backward",
    "router_forward",
    "rows_to_pad",
    "scale_of_amax",
    "set_auto_pad",
    "set_check_device",
    "set_graph_phase",
    "split_rotated",
    "stack_values",
    "stage_clock",
    "stage_nanoseconds",
    "traced_backward",
    "traced_backward_call",
    "traced_call",
    "traced_columns",
    "traced_describe",
    "traced_forward",
    "traced_forward_call",
    "traced_install",
    "traced_on_nothing",
    "traced_register",
    "traced_update_scales",
    "update_scales",
    "version_of_copy",
    "weight_gradient",
]

_Operand = tuple[Tensor | None, str | None, Tensor | None, int, bool]

@final
class AmaxSlots:
    def __new__(
        cls,
        amax_history: Tensor,
        scale: Tensor,
        recipe: Recipe,
        forward: bool,
        group: Any = None,
        former: AmaxSlots | None = None,
        /,
    ) -> Self: ...
    @property
    def id(self) -> int: ...
    @property
    def ran(self) -> bool: ...
    def take_part(self) -> None: ...
    def mark_ran(self) -> None: ...
    def clear_ran(self) -> None: ...

@final
class HeldRegion:
    def __new__(
        cls, recipe: Any, enabled: bool, calibrating: bool, graph: bool, group: Any, /
    ) -> Self: ...
    def take_back(self) -> None: ...

@disjoint_base
class AutocastRegion:
    def __new__(
        cls,
        enabled: Any = ...,
        calibrating: Any = ...,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: Any = ...,
        **others: Any,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Dispatcher: ...

@final
class WeightHandle:
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    save_original_input: bool
    def __new__(cls, name: str) -> Self: ...
    @property
    def name(self) -> str: ...
    def deferred_count(self) -> int: ...
    def forget_deferred(self, kept: int) -> None: ...
    def defer(self, x: Tensor, grad: Tensor, overwrite_main_grad: bool) -> None: ...
    def drop_slots(self) -> None: ...
    def drop_weight_cache(self, of_graphs: bool = True) -> None: ...
    def set_slots(
        self,
        epoch: int,
        forward: AmaxSlots,
        backward: AmaxSlots,
        forward_base: int,
        backward_base: int,
    ) -> None: ...
    def weight_cache(self) -> tuple[Tensor, int, bool, bool] | None: ...

@final
class ProgramSaved:
    @property
    def holds_weights(self) -> bool: ...
    @property
    def updates_backward_scales(self) -> bool: ...

@final
class Buffers:
    def __new__(cls, output: Tensor | None, grad_input: Tensor | None, /) -> Self: ...

@final
class Snapshot:
    def __new__(
        cls, owner: Any, names: tuple[str, ...], modules: Sequence[tuple[Any, tuple[str, ...]]], /
    ) -> Self: ...
    def holds(self, owner: Any) -> bool: ...

@final
class CutCall: ...

@final
class CutSaved: ...

@final
class ObservedLaunches: ...

@final
class RepeatedLaunches:
    @property
    def workspace_bytes(self) -> int: ...
    def __len__(self) -> int: ...

@final
class RepeatedAttention:
    def __new__(
        cls,
        forward: RepeatedLaunches,
        backward: tuple[RepeatedLaunches, Sequence[Tensor]] | None,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        heads: tuple[int, int, int, bool],
        interleaved: bool,
        order: tuple[int, ...],
        /,
    ) -> Self: ...
    def run(
        self, product: Tensor, waves: tuple[Tensor, Tensor, Tensor, Tensor] | None, /
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...
    def grad(
        self,
        tensors: tuple[Tensor, ...],
        grad: Tensor,
        waves: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        /,
    ) -> Tensor: ...

@final
class RepeatedCall:
    def __new__(
        cls, launches: RepeatedLaunches, given: Sequence[Tensor], made: Sequence[Tensor], /
    ) -> Self: ...
    def run(self, *given: Tensor) -> tuple[Tensor, ...] | None: ...

@final
class OptimizerWrites:
    def __new__(cls, parameters: list[Tensor]) -> Self: ...
    def is_of(self, parameters: list[Tensor]) -> bool: ...
    def note_step(self) -> None: ...

@final
class Program:
    is_direct: bool
    def forget_region(self) -> None: ...
    def __new__(cls, name: str, /, *, outside_fp8: str = "program") -> Self: ...
    def return_bias(self, parameters: dict[str, Any], name: str) -> None: ...
    @property
    def has_parts(self) -> bool: ...
    def parameter_parts(self) -> list[list[Tensor]]: ...
    @property
    def num_ops(self) -> int: ...
    @property
    def num_extra_inputs(self) -> int: ...
    @property
    def num_extra_outputs(self) -> int: ...
    @property
    def signature(self) -> str: ...
    @property
    def reads_fp8(self) -> bool: ...
    def activation(
        self,
        label: str,
        kind: str,
        *,
        interleave: int = 0,
        scaled: bool = False,
        cache_quantized_input: bool = False,
        recompute: bool = False,
        **constants: float,
    ) -> None: ...
    def add_extra_input(self, label: str, in_place: bool) -> None: ...
    def add_residual(self, label: str, begin: int) -> None: ...
    def bias(
        self,
        label: str,
        parameters: dict[str, Any],
        name: str,
        size: int,
        parts: Sequence[str] = ...,
    ) -> None: ...
    def constant_scale(self, label: str, scale: float) -> None: ...
    def drop_plans(self) -> None: ...
    def explain(self) -> list[dict[str, Any]]: ...
    def grouped_bias(
        self,
        label: str,
        parameters: dict[str, Any],
        biases: Sequence[str],
        num_groups: int,
        size: int,
    ) -> None: ...
    def grouped_linear(
        self,
        label: str,
        handle: WeightHandle,
        parameters: dict[str, Any],
        weights: Sequence[str],
        num_groups: int,
        in_features: int,
        out_features: int,
        slots: tuple[int, int],
    ) -> None: ...
    def fuse_parts(self) -> None: ...
    def identity(self, label: str) -> None: ...
    def permute(self, label: str, num_experts: int, topk: int, *, routed: bool = ...) -> None: ...
    def router(
        self,
        label: str,
        parameters: dict[str, Any],
        weight: str,
        num_experts: int,
        cols: int,
        choice: tuple[int, int, int, str, str, float],
        *,
        biased: bool,
        logits: bool,
    ) -> None: ...
    def unpermute(self, label: str) -> None: ...
    def linear(
        self,
        label: str,
        handle: WeightHandle,
        parameters: dict[str, Any],
        weight: str,
        in_features: int,
        out_features: int,
        parts: Sequence[str] = ...,
    ) -> None: ...
    def make_extra_output(self, label: str, in_place: bool) -> None: ...
    def norm(
        self,
        label: str,
        kind: str,
        parameters: dict[str, Any],
        weight: str,
        bias: str | None,
        cols: int,
        eps: float,
        zero_centered_gamma: bool,
    ) -> None: ...
    def plan_count(self) -> int: ...
    def residual(self, label: str) -> int: ...
    def widths(self, cols: int) -> list[int]: ...

@final
class ProgramSteps:
    def __new__(cls, steps: list[Program | Callable[[Tensor], Tensor]]) -> Self: ...
    def learn(self, /, x: Tensor) -> None: ...

@final
class QuantizedValue:
    row: Tensor | None
    row_scale: Tensor | None
    col: Tensor | None
    col_scale: Tensor | None
    col_is_valid: bool
    keeps_col: bool
    fp8: str
    @property
    def block(self) -> int: ...
    @property
    def groups(self) -> int: ...
    def __new__(
        cls,
        block: int,
        fp8: str,
        row: Tensor | None,
        row_scale: Tensor | None,
        col: Tensor | None,
        col_scale: Tensor | None,
        groups: int = 1,
    ) -> Self: ...
    def share(self) -> QuantizedValue: ...
    def note_same_bytes(self, other: QuantizedValue) -> None: ...
    def note_write(self) -> None: ...
    def quantize(
        self,
        x: Tensor,
        usage: tuple[bool, bool],
        rule: tuple[bool, float, bool],
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        noop: Tensor | None = None,
        /,
    ) -> None: ...
    def transpose(self) -> None: ...
    def dequantize(self, dtype: Any) -> Tensor: ...

@final
class Recipe:
    def __new__(
        cls,
        *,
        scaling: str,
        fwd: str,
        bwd: str,
        backward_override: str | None = None,
        power_2_scale: tuple[bool, bool, bool] = ...,
        amax_epsilon: tuple[float, float, float] = ...,
        block: tuple[int, int, int] = ...,
        split_accumulator: tuple[bool, bool, bool] = ...,
        margin: int = 0,
        history_len: int = 1024,
        most_recent: bool = False,
        reduce_amax: bool = True,
        custom: int = 0,
        factory: int = 0,
    ) -> Self: ...
    def __eq__(self, value: object, /) -> bool: ...
    @property
    def number(self) -> int: ...

@final
class CurrentRegion:
    def __new__(cls) -> Self: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def calibrating(self) -> bool: ...
    @property
    def is_of_factory(self) -> bool: ...
    @property
    def epoch(self) -> int: ...

@final
class TracedCall:
    @property
    def text(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def widths(self) -> list[int]: ...
    @property
    def outputs(self) -> list[tuple[str, int]]: ...
    @property
    def saved(self) -> tuple[int, int, int]: ...
    @property
    def weights(self) -> list[tuple[int, int]]: ...
    @property
    def memory(self) -> list[int]: ...
    @property
    def weights_of_backward(self) -> list[tuple[str, int]]: ...
    @property
    def given(self) -> list[int]: ...
    @property
    def keeps_weights(self) -> bool: ...
    @property
    def reads(self) -> list[tuple[str, int]]: ...
    @property
    def input_grad(self) -> bool: ...
    @property
    def grad_input(self) -> tuple[str, int]: ...
    @property
    def grad_extras(self) -> list[tuple[str, int]]: ...
    @property
    def param_grads(self) -> list[bool]: ...
    @property
    def param_shapes(self) -> list[tuple[int, ...]]: ...
    @property
    def grad_dtypes(self) -> list[Any]: ...
    @property
    def extra_grads(self) -> list[bool]: ...
    @property
    def extra_widths(self) -> list[int]: ...
    @property
    def extra_dtypes(self) -> list[Any]: ...
    @property
    def fused(self) -> list[int]: ...
    @property
    def deferred(self) -> list[int]: ...
    @property
    def fused_later(self) -> list[int]: ...
    @property
    def parts(self) -> list[list[int]]: ...
    @property
    def part_grads(self) -> list[list[bool]]: ...
    @property
    def fuses_parts(self) -> bool: ...
    @property
    def fused_parts(self) -> list[int]: ...
    @property
    def overwritten(self) -> list[bool]: ...
    @property
    def is_delayed(self) -> bool: ...
    def missing_rows(self, rows: int) -> int: ...

def activation(
    x: Tensor,
    function: tuple[str, int, float, float, float, float, float],
    outputs: tuple[Tensor | None, ...],
    scales: tuple[Tensor | None, ...],
    /,
) -> None: ...
def activation_backward(
    dy: Tensor,
    x: Tensor,
    function: tuple[str, int, float, float, float, float, float],
    outputs: tuple[Tensor | None, ...],
    scales: tuple[Tensor | None, ...],
    /,
) -> None: ...
def activation_groups(
    x: Tensor,
    dy: Tensor | None,
    function: tuple[str, int, float, float, float, float, float],
    splits: Tensor,
    recipe: Recipe,
    layouts: tuple[bool, bool],
    slots: tuple[Tensor | None, Tensor | None],
    row_scale: Tensor | None,
    /,
) -> list[Tensor | None]: ...
def amax(x: Tensor, /) -> Tensor: ...
def amax_mark_all_ran(forward: bool, /) -> None: ...
def amax_participants(forward: bool, /) -> list[int]: ...
def are_as_found(watched: Sequence[tuple[Any, Sequence[tuple[str, Any]]]], /) -> bool: ...
def are_called_plainly(*modules: Any) -> bool: ...
def autocast_callbacks(prepare: Any, update: Any, /) -> None: ...
def autocast_enter_phase() -> int: ...
def autocast_held() -> tuple[bool, bool]: ...
def autocast_is_of_factory() -> bool: ...
def autocast_leave_phase(thread: int, /) -> None: ...
def autocast_objects() -> Any: ...
def autocast_phase_thread() -> int | None: ...
def autocast_region() -> Any: ...
def autocast_reset() -> None: ...
def autocast_set(
    recipe: Any, enabled: Any, calibrating: Any, graph: Any, group: Any, /
) -> None: ...
def autocast_set_depth(depth: int, /) -> None: ...
def autocast_set_first(is_first: bool, /) -> None: ...
def autocast_take_first() -> bool: ...
def counters() -> dict[str, int]: ...
def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    grad: Tensor,
    vocabulary: Tensor | None,
    dlogits: Tensor,
    ignored: int,
    smoothing: float,
    /,
) -> None: ...
def cross_entropy_forward(
    logits: Tensor, target: Tensor, ignored: int, smoothing: float, keeps: bool, /
) -> tuple[Tensor, Tensor | None]: ...
def cross_entropy_part(logits: Tensor, smoothing: float, /) -> Tensor: ...
def cublas_multiplies_groups(index: int, operands: str, /) -> bool: ...
def cuda_driver_version() -> int: ...
def delayed_callbacks(world_size: Any, agree: Any, all_reduce: Any, update: Any, /) -> None: ...
def cut_apply(
    first: tuple[Program, Any],
    second: tuple[Program, Any],
    x: Tensor,
    between: Any,
    is_first_microbatch: bool | None = None,
    /,
) -> Tensor | None: ...
def cut_autograd_forward(ctx: Any, *arguments: Any) -> Tensor: ...
def cut_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]: ...
def dequantize(
    data: Tensor, scale_inv: Tensor, fp8: str, block: int, cols: int, out: Tensor, /
) -> None: ...
def device_facts(ordinal: int, /) -> tuple[tuple[int, int], int, int, int]: ...
def gemm(
    x: _Operand,
    w: _Operand,
    d: Tensor,
    bias: Tensor | None,
    accumulate: bool,
    fast_accumulation: bool,
    exact: bool,
    /,
) -> None: ...
def grouped_gemm(
    a: tuple[Tensor, Tensor | None],
    b: tuple[Tensor, Tensor | None],
    d: Tensor,
    splits: Tensor,
    bias: Tensor | None,
    weight_gradient: bool,
    accumulate: bool,
    fast_accumulation: bool,
    align: int,
    /,
) -> None: ...
def install_hooks(
    *,
    apply: Any,
    backward_once: Any,
    apply_cut: Any,
    cut_backward_once: Any,
    padded: Any,
    padded_run: Any,
    on_nothing: Any,
    update_backward_scales: Any,
    skip_weight_flag: Any,
    recompute: Any,
    dummy_wgrad: Any,
    forget_maximum: Any,
) -> None: ...
def grouped_layer_call(module: Any, *arguments: Any, **keywords: Any) -> Any: ...
def grouped_layer_straight(
    module: Any, inp: Any, counts: Any, is_first_microbatch: Any = None, /
) -> Any: ...
def grouped_layer_forward(
    module: Any,
    inp: Any,
    splits: Any,
    is_first_microbatch: bool | None = None,
    buffers: Buffers | None = None,
    /,
) -> Any | None: ...
def instance_method(function: Any) -> Any: ...
def inventory() -> list[tuple[str, int, int, int]]: ...
def join_rotated(
    grads: tuple[Tensor, Tensor, Tensor],
    waves: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    heads: tuple[int, int, int, bool],
    interleaved: bool,
    order: tuple[int, int, int, int] | None,
    /,
) -> Tensor: ...
def layer_call(
    module: Any,
    inp: Any = ...,
    is_first_microbatch: Any = None,
    fp8_output: Any = None,
    fp8_grad: Any = None,
    **others: Any,
) -> Any: ...
def install_tensors(*, per_tensor: type[Tensor], block: type[Tensor]) -> None: ...
def layer_forward(
    module: Any,
    inp: Any,
    is_first_microbatch: Any = None,
    fp8_output: Any = None,
    fp8_grad: Any = None,
) -> Any: ...
def learns_launches() -> bool: ...
def load_kernels(ordinal: int, /) -> int: ...
def moe_apply(
    inp: Any,
    probs: Any,
    row_id_map: Any,
    pad_offsets: Any,
    ends: Any,
    rows: Any,
    top_k: Any,
    scales: Any = None,
    /,
) -> Any: ...
def moe_dropped(like: Any, clear: Any, /) -> Any: ...
def moe_map(routing_map: Any, align: Any, index: Any, /) -> Any: ...
def moe_pad(
    inp: Any, probs: Any, splits: Any, index: Any, mode: Any, align: Any, rows: Any, /
) -> Any: ...
def moe_pad_list(inp: Any, splits: Any, mode: Any, align: Any, /) -> Any: ...
def moe_padded_splits(splits: Any, mode: Any, align: Any, in_rows: Any, /) -> Any: ...
def moe_permute(
    inp: Any,
    routing_map: Any,
    probs: Any,
    rows: Any,
    align: Any,
    index: Any,
    keep_ends: Any,
    scales: Any = None,
    /,
) -> Any: ...
def moe_permute_cast(
    inp: Any, routing_map: Any, probs: Any, rows: Any, align: Any, cast: Any, /
) -> Any: ...
def moe_unpermute(
    inp: Any,
    row_id_map: Any,
    probs: Any,
    pad_offsets: Any,
    in_probs: Any,
    tokens: Any,
    top_k: Any,
    /,
) -> Any: ...
def moe_unpermute_backward(
    dout: Any, inp: Any, row_id_map: Any, probs: Any, pad_offsets: Any, ends: Any, top_k: Any, /
) -> Any: ...
def new_stream(index: int, /) -> int: ...
def norm(
    x: Tensor,
    function: tuple[str, float, bool],
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
    /,
) -> None: ...
def norm_backward(
    x: Tensor,
    function: tuple[str, float, bool],
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
    /,
) -> None: ...
def note_scale_change() -> None: ...
def observe_launches(
    alike: Tensor, call: Callable[[], Any], /
) -> tuple[Any, ObservedLaunches | None]: ...
def repeat_launches(
    captures: list[tuple[ObservedLaunches, list[Tensor]]], workspace: tuple[int, int], /
) -> RepeatedLaunches | None: ...
def set_graph_phase(begins: bool, /) -> None: ...
def program_apply(
    program: Program,
    owner: Any,
    x: Tensor,
    extra_inputs: tuple[Tensor, ...],
    is_first_microbatch: bool | None = None,
    params: tuple[Tensor, ...] | None = None,
    version: int | None = None,
    buffers: Buffers | None = None,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    /,
) -> Any: ...
def program_autograd_forward(ctx: Any, *arguments: Any) -> Any: ...
def program_backward(ctx: Any, *grads: Tensor) -> Any: ...
def program_backward_dw(
    handle: WeightHandle, weight: Tensor, fuse_wgrad_accumulation: bool, /
) -> Tensor | None: ...
def program_grads_of_nothing(
    program: Program,
    params: tuple[Tensor, ...],
    wanted: Sequence[bool],
    overwrite_main_grad: bool,
    /,
) -> tuple[Tensor | None, ...]: ...
def program_module_call(
    module: Any,
    input: Any = ...,
    *extra_inputs: Tensor,
    is_first_microbatch: bool | None = None,
    **others: Any,
) -> Any: ...
def program_run_backward(
    kept: ProgramSaved,
    saved_tensors: tuple[Tensor | None, ...],
    grad_output: Tensor,
    extra_grads: tuple[Tensor, ...],
    transfers: tuple[Sequence[Any], bool] | None = None,
    /,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]: ...
def program_run_forward(
    program: Program,
    owner: Any,
    x: Tensor,
    extra_inputs: tuple[Tensor, ...],
    is_first_microbatch: bool | None,
    input_needs_grad: bool,
    extra_need_grad: Sequence[bool],
    parameters_need_grad: bool,
    params: tuple[Tensor, ...] | None = None,
    version: int | None = None,
    transfers: tuple[Sequence[Any], bool] | None = None,
    /,
) -> tuple[Tensor, tuple[Tensor, ...], ProgramSaved | None, tuple[Tensor | None, ...]]: ...
def quantize(
    x: Tensor,
    recipe: Recipe,
    role: str,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    dbias: bool,
    /,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...
def quantize_groups(
    x: Tensor,
    splits: Tensor | None,
    recipe: Recipe,
    role: str,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    /,
) -> list[Tensor | None]: ...
def record(mode: str, /) -> None: ...
def recorded() -> list[Any]: ...
def release_memory() -> None: ...
def reset_counters() -> None: ...
def plain_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], written: int, /
) -> tuple[tuple[Any, ...], list[Any], list[Tensor]] | None: ...
def quantize_whole(
    weights: Sequence[Any], masters: Sequence[Any], starts: Sequence[int | None], /
) -> bool: ...
def requantize(tensors: Sequence[Any], sources: Sequence[Tensor], /) -> list[int]: ...
def router_backward(
    grad: Tensor,
    scores: Tensor,
    map: Tensor | None,
    choice: tuple[int, int, int, str, str, float],
    dlogits: Tensor,
    /,
) -> None: ...
def router_forward(
    logits: Tensor,
    bias: Tensor | None,
    choice: tuple[int, int, int, str, str, float],
    indices: Tensor | None,
    wanted: tuple[bool, bool, bool],
    balance: tuple[Tensor, Tensor] | None = ...,
    /,
) -> list[Tensor | None]: ...
def rotate(
    turns: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    interleaved: bool,
    transposed: bool,
    /,
) -> None: ...
def rows_to_pad(rows: int, /) -> int: ...
def scale_of_amax(amax: Tensor, fp8: str, eps: float, pow2: bool, /) -> Tensor: ...
def set_auto_pad(enabled: bool, /) -> bool: ...
def set_check_device(enabled: bool, /) -> bool: ...
def split_rotated(
    product: Tensor,
    in_place: bool,
    waves: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    heads: tuple[int, int, int, bool],
    interleaved: bool,
    order: tuple[int, int, int, int] | None,
    /,
) -> tuple[Tensor, Tensor, Tensor]: ...
def stack_values(parts: list[QuantizedValue], /) -> QuantizedValue | None: ...
def stage_clock(on: bool, /) -> None: ...
def stage_nanoseconds() -> list[tuple[str, int]]: ...
def traced_backward(
    reads: list[Tensor], writes: list[Tensor], program: Tensor, call: int, /
) -> None: ...
def traced_backward_call(
    operator: Any, reads: Any, writes: Any, program: Any, call: Any
) -> Any: ...
def traced_call(
    handle: Program,
    x: Tensor,
    extras: Sequence[Tensor],
    params: Sequence[Tensor],
    wants: tuple[bool, Sequence[Sequence[tuple[int, bool, bool]]], Sequence[bool]],
    how: tuple[bool | None, bool | None, bool],
    given: Sequence[tuple[int, str, bool, int] | None],
    /,
) -> TracedCall: ...
def traced_columns(call: int, /) -> list[bool]: ...
def traced_on_nothing(program: Tensor, call: int, /) -> None: ...
def traced_describe(call: TracedCall, /) -> TracedCall: ...
def traced_forward(
    reads: list[Tensor], writes: list[Tensor], program: Tensor, call: int, /
) -> None: ...
def traced_forward_call(operator: Any, reads: Any, writes: Any, program: Any, call: Any) -> Any: ...
def traced_install(forward: Any, backward: Any, after_backward: Any, /) -> None: ...
def traced_register(handle: Tensor, number: int, program: Program, owner: Any, /) -> None: ...
def traced_update_scales(programs: Sequence[Tensor], recipe: Recipe, /) -> None: ...
def update_scales(forward: bool, distributed: bool = False, unfused: bool = False, /) -> None: ...
def version_of_copy() -> int: ...
def weight_gradient(
    x: Tensor, grad: Tensor, out: Tensor | None = None, accumulate: bool = False, /
) -> Tensor | None: ...
