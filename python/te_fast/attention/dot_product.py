"""Attention as a module: translates Transformer Engine's arguments to those of torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from te_fast import _config
from te_fast.attention import scores as core
from te_fast.attention.arguments import (
    Lengths,
    channels_of,
    check_bias,
    check_heads,
    check_lengths,
    check_name,
    check_padding,
    check_scores,
    checked_cap,
    checked_probability,
    unpacked,
)
from te_fast.attention.context import ranks_of
from te_fast.attention.inference import InferenceParams, check_caches
from te_fast.attention.packed import (
    Packing,
    attend_packed,
    max_logits_of_packed,
    pack,
    packings_of,
    unpack,
)
from te_fast.attention.rules import (
    BIAS_TYPES,
    DISPATCHES,
    FORMATS,
    SOFTMAX_TYPES,
    CPLoadBalancingStrategy,
    Kept,
    Rule,
    kept_of_lengths,
    mask_type_of,
    rule_of,
    sizes_of,
)
from te_fast.attention.scores import Bias, Scores
from te_fast.errors import DeviceError, DtypeError, ShapeError, StateError, UnsupportedError
from te_fast.graphs.refusal import refusal
from te_fast.graphs.region import entered, key_of_region
from te_fast.layers.base import TransformerEngineBaseModule
from te_fast.layers.parameters import check_sizes, refuse
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import divided, reduced_sharing
from te_fast.runtime import native
from te_fast.runtime.arguments import check_flags, check_numbers
from te_fast.runtime.compiling import is_in_graph
from te_fast.runtime.device import check_device
from te_fast.runtime.recompute import checkpoint
from te_fast.state import extra_state

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def recipe_for_fp8() -> tuple[Any, str | None]:
    """Return the recipe in force, and the field by which it asks for attention in FP8, if it does.

    Regions whose recipes differ in such a field alone have one epoch, since linear layers compute alike in them.
    """
    region = entered.region
    recipe = native.autocast_objects()[0] if region is None else region.recipe
    if getattr(recipe, "fp8_dpa", False):
        return recipe, "fp8_dpa"
    return recipe, "fp8_mha" if getattr(recipe, "fp8_mha", False) else None


class DotProductAttention(TransformerEngineBaseModule):
    """Attend: ``softmax(Q Kᵀ · scale + bias) V`` (https://arxiv.org/abs/1706.03762), by torch's kernels.

    Parameters
    ----------
    num_attention_heads : int
        Heads of queries.
    kv_channels : int or tuple of int
        Channels of a head, or the channels of a key and the channels of a value.
    num_gqa_groups : int, optional
        Heads of keys and values, a divisor of `num_attention_heads`, which is the default.
    attention_dropout : float, default = 0.0
        Probability by which a weight is dropped in training.
    qkv_format : {'sbhd', 'bshd', 'thd'}, default = 'sbhd'
        Order of sequence, batch, heads and channels; tokens of packed sequences in one dimension.
    attn_mask_type : str, default = 'causal'
        ``no_mask``, ``padding``, ``causal``, ``padding_causal``, ``causal_bottom_right``,
        ``padding_causal_bottom_right`` or ``arbitrary``.
    window_size : tuple of int, optional
        Keys before and behind the diagonal that a query attends to; -1 is all.
    bottom_right_diagonal : bool, optional
        Whether windows and ALiBi use the bottom right diagonal, for mask types that do not say; the default is True.
    softcap : float, default = 0.0
        Bounds scaled scores by ``softcap · tanh(scores / softcap)``. The whole matrix of scores is then in memory, and
        products of queries and keys are rounded to their type. 0 sets no bound.
    tp_size : int, default = 1
        Ranks that share the heads: tensors have ``num_attention_heads / tp_size`` and ``num_gqa_groups / tp_size``.
    tp_group : torch.distributed.ProcessGroup, optional
        Those ranks. Attention makes no collective of its own.
    sequence_parallel : bool, default = False
        Dropout draws from the current generator, whatever `get_rng_state_tracker` is.
    cp_group, cp_global_ranks, cp_stream, cp_comm_type : optional
        As :meth:`set_context_parallel_group` takes them.
    get_rng_state_tracker : Callable, optional
        Gives the tracker whose generator dropout draws from.
    layer_number : int, optional
        Number of the layer, from 1: names its part of a key-value cache.
    attention_type : {'self', 'cross'}, default = 'self'
        Whether a padding mask is one tensor, or one for queries and one for keys.
    softmax_scale : float, optional
        Factor of the products; ``1 / sqrt(channels of a key)`` by default.
    softmax_type : {'vanilla', 'off-by-one', 'learnable'}, default = 'vanilla'
        Add nothing, 1, or ``exp(softmax_offset)`` to the sum of the softmax (https://arxiv.org/abs/2309.17453).
    return_max_logit : bool, default = False
        Return the largest score of each head beside the result.
    name : str, optional
        Name in messages.
    device : torch.device or str, optional
        Where ``softmax_offset`` is made: the GPU if there is one, by default. A keyword of te_fast.

    Attributes
    ----------
    softmax_offset : torch.nn.Parameter
        ``(num_attention_heads / tp_size,)``, FP32: learnt for ``learnable``, zeros for ``off-by-one``, else None.

    Raises
    ------
    UnsupportedError
        For an argument that te_fast does not support yet.
    ShapeError
        If heads are not a multiple of groups, groups are not a multiple of `tp_size`, or a name is unknown.

    See Also
    --------
    MultiheadAttention : Attention with its projections.
    TransformerLayer : A whole layer.

    Notes
    -----
    ``NVTE_FLASH_ATTN``, ``NVTE_FUSED_ATTN`` and ``NVTE_UNFUSED_ATTN`` choose among torch's kernels: flash attention,
    cuDNN's and the memory-efficient kernel, and plain matrix products with a softmax. With
    ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` attention uses plain products, unless torch's own switch for deterministic
    algorithms is on, which kernels obey. Attention computes in the type of its inputs; recipes with ``fp8_dpa`` or
    ``fp8_mha`` raise.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> attention = te.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd")
    >>> q, k, v = (torch.randn(2, 8, heads, 16) for heads in (4, 2, 2))
    >>> attention(q, k, v, attn_mask_type="causal").shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(name)
        # No norm and no product here is split by rows.
        self._share_among_ranks(tp_group, tp_size, sequence_parallel=False)
        key, value = channels_of(self.name, kv_channels)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_sizes(self.name, num_attention_heads=num_attention_heads, num_gqa_groups=groups)
        if groups == 0 or num_attention_heads % groups:
            message = (
                f"{self.name}: num_attention_heads must be a multiple of num_gqa_groups, got {num_attention_heads} "
                f"and {groups}"
            )
            raise ShapeError(message)
        check_name(self.name, "qkv_format", qkv_format, FORMATS)
        check_name(self.name, "attention_type", attention_type, ("self", "cross"))
        check_name(self.name, "softmax_type", softmax_type, SOFTMAX_TYPES)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.num_gqa_groups_per_partition = divided(
            self.name, "num_gqa_groups", groups, self.tp_size
        )
        self._heads_here = num_attention_heads // self.tp_size
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = key, value
        self.qkv_format = qkv_format
        self.attn_mask_type = mask_type_of(attn_mask_type, self.name)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        check_numbers(self.name, softcap=softcap)
        self.softcap = softcap
        self._rules: dict[Any, Rule] = {}
        self._rule(None, None, None)
        self.attention_type = attention_type
        self.attention_dropout = checked_probability(
            self.name, "attention_dropout", attention_dropout
        )
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        self.layer_number = 1 if layer_number is None else layer_number
        scale = 1.0 / math.sqrt(max(key, 1)) if softmax_scale is None else softmax_scale
        check_numbers(self.name, softmax_scale=scale)
        self.softmax_scale = scale
        self.return_max_logit = return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self._choose_kernels()
        self.softmax_type = softmax_type
        self._make_offset(device)

    def _choose_kernels(self) -> None:
        deterministic = _config.attention_is_deterministic()
        self.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        chosen = _config.attention_backends()
        if deterministic and not torch.are_deterministic_algorithms_enabled():
            chosen = (False, False, chosen[2])
        if not any(chosen):
            message = (
                f"{self.name}: no kernel is left: NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN turn all "
                "off (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 all but the last)"
            )
            raise UnsupportedError(message)
        self._kernels = chosen

    def _make_offset(self, device: torch.device | str | None) -> None:
        self.softmax_offset: torch.Tensor | None
        if self.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        if device is None and torch.cuda.is_available():
            device = "cuda"
        kind: dict[str, Any] = {"device": check_device(device, self.name), "dtype": torch.float32}
        zeros = torch.zeros(self._heads_here, **kind)
        if self.softmax_type == "learnable":
            self.register_parameter("softmax_offset", torch.nn.Parameter(zeros))
        else:
            self.register_buffer("softmax_offset", zeros, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Fill an offset that is always zero again: ``to_empty()`` gives new memory, and checkpoints do not have it."""
        result = super()._apply(fn, recurse)
        if self.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros_like(self.softmax_offset)  # type: ignore[arg-type]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let deep copies share the ranks of sequences."""
        groups = self.cp_group if isinstance(self.cp_group, (list, tuple)) else (self.cp_group,)
        return reduced_sharing(super().__reduce_ex__(protocol), [*groups, self._context])

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the learnable offset to zero, after making it real if it is on the meta device.

        Parameters
        ----------
        defer_init : bool, default = False
            Do nothing yet.
        """
        if defer_init or self.softmax_offset is None:
            return
        if self.softmax_offset.is_meta:
            delattr(self, "softmax_offset")
            self._make_offset(None if torch.cuda.is_available() else "cpu")
        else:
            torch.nn.init.zeros_(self.softmax_offset)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the ranks that share the tokens of sequences (context parallelism).

        In ``thd``, a rank has its chunks of the first sequence, of the second one, and so on. Cumulative lengths and
        starts are those of whole sequences, and the length of each, with the padding behind it, is a multiple of the
        number of chunks.

        Parameters
        ----------
        cp_group : torch.distributed.ProcessGroup or list of them, optional
            The ranks; None means one rank. For ``a2a+p2p``, the ranks that exchange heads, and those among which keys
            and values travel; adjacent ranks of a sequence exchange heads.
        cp_global_ranks, cp_stream : optional
            Not read: the group knows its ranks, and collectives run beside attention on streams of their own.
        cp_comm_type : {'p2p', 'all_gather', 'a2a', 'a2a+p2p'}, default = 'p2p'
            Keys and values travel from rank to rank; they are gathered at once; ranks exchange heads for tokens; the
            third, then the first. Windows, sinks, caps and dropout need ``a2a`` or ``all_gather``.
        load_balancing_strategy : CPLoadBalancingStrategy, default = DUAL_CHUNK_SWAP
            Which tokens each rank has.

        Raises
        ------
        ShapeError
            If the strategy is no :class:`te_fast.pytorch.CPLoadBalancingStrategy`, or `cp_comm_type` is unknown or
            does not fit the number of groups.
        DtypeError
            If `cp_group` is no group.
        RanksError
            If this rank is not in a group.
        """
        if not isinstance(load_balancing_strategy, CPLoadBalancingStrategy):
            message = (
                f"{self.name}: load_balancing_strategy must be a CPLoadBalancingStrategy, got "
                f"{type(load_balancing_strategy).__name__}"
            )
            raise ShapeError(message)
        self._context = ranks_of(self.name, cp_group, cp_comm_type, load_balancing_strategy)
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        self.load_balancing_strategy = load_balancing_strategy

    # Checkpoints ----------------------------------------------------------------------------------

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return that ranks share the learnable offset: each has those of its heads."""
        is_shared = self.tp_size > 1 and self.softmax_type == "learnable"
        return {"softmax_offset": Share(0, self.tp_group)} if is_shared else {}

    def set_extra_state(self, state: Any) -> None:
        """Accept the state of Transformer Engine's FP8 attention; te_fast does not use its scales.

        Raises
        ------
        StateError
            If the bytes are damaged.
        """
        extra_state.unpack(state, layer=self.name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # Where Transformer Engine 1.6 and 1.7 had them.
        old = f"{prefix}fused_attention._extra_state"
        unexpected: list[str] = rest[3]
        if old in unexpected:
            unexpected.remove(old)

    def _plan_count(self) -> int:
        return 0

    # Forward --------------------------------------------------------------------------------------

    def _named(self) -> str:
        """Return the name as a constant: a trace that reads the attribute is compiled for this module alone."""
        return self.name

    _named._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _rule(self, mask_type: str | None, window: Any, bottom_right: bool | None) -> Rule:
        """Return the arguments of a call; the constructor's arguments replace those that are None."""
        name = self._named()
        mask_type = self.attn_mask_type if mask_type is None else mask_type_of(mask_type, name)
        window = self.window_size if window is None else window
        window = None if window is None else sizes_of(window, name)
        bottom_right = self.bottom_right_diagonal if bottom_right is None else bottom_right
        if bottom_right is not None:
            check_flags(name, bottom_right_diagonal=bottom_right)
        asked = (mask_type, window, bottom_right)
        # A trace would guard that the dictionary lacks the rule, and so compile a second time.
        rule = None if is_in_graph() else self._rules.get(asked)
        if rule is None:
            rule = rule_of(mask_type, window, bottom_right, name)
            if not is_in_graph():
                self._rules[asked] = rule
        return rule

    def _names_of_linears(self) -> tuple[str, ...]:
        return ()

    def _check_region(self) -> None:
        """Raise in a region whose recipe asks for attention in FP8."""
        if key_of_region()[0] if is_in_graph() else native.autocast_region()[0]:
            self._refuse_fp8()

    def _refuse_fp8(self) -> None:
        """Raise if the recipe in force asks for attention in FP8; runs once in a trace, on the real module."""
        recipe, field = recipe_for_fp8()
        if field is not None:
            message = (
                f"{self.name}: attention in FP8 ({field}=True of {type(recipe).__name__}) is not supported yet; "
                "leave it at False, and attention computes in high precision"
            )
            raise UnsupportedError(message)

    _refuse_fp8._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, torch.Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, torch.Tensor] | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Parameters
        ----------
        query_layer, key_layer, value_layer : torch.Tensor
            ``(s, b, heads, d)``, ``(b, s, heads, d)`` or ``(t, heads, d)``, with any strides.
        attention_mask : torch.Tensor or tuple, optional
            bool, True where nothing is attended to. For ``padding``: ``(b, 1, 1, s)``, or two of them, for queries and
            keys, in cross attention. For ``arbitrary``: broadcastable to ``(b, heads, s_q, s_kv)``. Other mask types
            do not read it.
        qkv_format : str, optional
            The constructor's by default.
        cu_seqlens_q, cu_seqlens_kv : torch.Tensor, optional
            ``(b + 1,)``, int32: cumulative lengths of sequences, for ``thd`` or in place of a padding mask.
        cu_seqlens_q_padded, cu_seqlens_kv_padded : torch.Tensor, optional
            ``(b + 1,)``, int32: where sequences begin in ``thd``, if there are gaps between them.
        max_seqlen_q, max_seqlen_kv : int, optional
            The longest sequences of ``thd``; without them, the host waits until the GPU has computed them.
        attn_mask_type, window_size, bottom_right_diagonal, softcap : optional
            The constructor's by default.
        checkpoint_core_attention : bool, default = False
            Keep only queries, keys and values, and compute attention again in backward.
        core_attention_bias_type : {'no_bias', 'pre_scale_bias', 'post_scale_bias', 'alibi'}, default = 'no_bias'
            Whether a bias is added before or after the scale, or is ALiBi's.
        core_attention_bias : torch.Tensor, optional
            ``(1 or b, 1 or heads, 1 or s_q, s_kv)``.
        alibi_slopes : torch.Tensor, optional
            ``(heads,)`` or ``(b, heads)``, FP32; the slopes of the paper by default.
        fast_zero_fill, num_splits : optional
            Options of Transformer Engine's kernels; results do not depend on them.
        inference_params : InferenceParams, optional
            Key-value caches, which store keys and values and return those of earlier steps.
        pad_between_seqs : bool, optional
            False: there are no gaps between the sequences of ``thd``; the tensors of starts are ignored.
        fp8_output, bf16_backward : bool, default = False
            Options of attention in FP8; without it `fp8_output` has no effect, as in Transformer Engine.
        score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors : optional
            Callbacks for cuDNN's graphs; not supported.
        qkv_layer, kv_layer : torch.Tensor, optional
            Queries, keys and values in one tensor, or keys and values, with one more dimension of size 3 or 2.
        qkv_interleave_dim : {-3, -2}, default = -3
            Which dimension that is.
        thd_attention_policies, thd_attention_policy_dispatch : optional
            Masks of parts of packed sequences; not supported.

        Returns
        -------
        torch.Tensor or tuple
            Heads merged: ``(s, b, heads · d_v)``, ``(b, s, heads · d_v)`` or ``(t, heads · d_v)``; then, with
            `return_max_logit`, the largest score of each head.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If tensors do not fit each other or the module.
        StateError
            If another layer of the same `layer_number` has used the caches in this step.
        UnsupportedError
            For arguments that torch's kernels do not support.
        """
        callbacks = (score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
        if bf16_backward or callbacks != (None, None, None, None):
            refuse(self._named(), {"bf16_backward": bool(bf16_backward), "score_mod": True})
        check_name(
            self._named(),
            "thd_attention_policy_dispatch",
            thd_attention_policy_dispatch,
            DISPATCHES,
        )
        refuse(self._named(), {"thd_attention_policies": thd_attention_policies is not None})
        fmt = self.qkv_format if qkv_format is None else qkv_format
        check_name(self._named(), "qkv_format", fmt, FORMATS)
        heads: Any = (query_layer, key_layer, value_layer)
        if qkv_layer is not None or kv_layer is not None:
            heads = unpacked(self._named(), (qkv_layer, kv_layer), heads, fmt, qkv_interleave_dim)
        self._check_region()
        check_heads(self, heads, fmt)
        rule = self._rule(attn_mask_type, window_size, bottom_right_diagonal)
        lengths = Lengths(
            cu_seqlens_q,
            cu_seqlens_kv,
            None if pad_between_seqs is False else cu_seqlens_q_padded,
            None if pad_between_seqs is False else cu_seqlens_kv_padded,
            max_seqlen_q,
            max_seqlen_kv,
        )
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes, heads[0])
        dropout = self.attention_dropout if self.training else 0.0
        cap = checked_cap(self, self.softcap if softcap is None else softcap)
        sink = self._sink(heads[0].device)
        how = Scores(rule, self.softmax_scale, dropout, bias, sink=sink, softcap=cap)
        if self._context is not None:
            self._refuse_with_ranks(inference_params)
        if inference_params is not None:
            check_caches(self.name, inference_params)
            return self._with_cache(heads, how, fmt, lengths, inference_params)
        return self._merged(
            heads, how, fmt, lengths, attention_mask, recomputes=checkpoint_core_attention
        )

    _called_forward = forward

    def _sink(self, device: torch.device) -> torch.Tensor | None:
        """Return the offset where queries are.

        Raises
        ------
        DeviceError
            If it is a parameter on another device.
        """
        offset = self.softmax_offset
        if offset is None or offset.device == device:
            return offset
        if self.softmax_type == "learnable":
            message = f"{self.name}: softmax_offset is on {offset.device}, and queries are on {device}; move the layer"
            raise DeviceError(message)
        with torch.inference_mode(
            False
        ):  # always zero: a checkpoint does not bring it from the meta device
            self.softmax_offset = torch.zeros_like(offset, device=device)
        return self.softmax_offset

    def _bias(self, kind: str, tensor: Any, slopes: Any, q: torch.Tensor) -> Bias:
        """Return the bias that is added to scores.

        Raises
        ------
        ShapeError
            If type and tensors contradict each other.
        """
        if kind == "alibi" and slopes is None and self.tp_size > 1:
            message = (
                f"{self.name}: the layer does not know which heads this rank has; pass alibi_slopes of its heads with "
                f"tp_size = {self.tp_size}"
            )
            raise ShapeError(message)
        if kind == "no_bias" and tensor is None and slopes is None:
            return Bias()
        check_name(self._named(), "core_attention_bias_type", kind, BIAS_TYPES)
        is_tensor = kind in ("pre_scale_bias", "post_scale_bias")
        if is_tensor != (tensor is not None) or (slopes is not None and kind != "alibi"):
            message = (
                f"{self.name}: core_attention_bias_type={kind!r} takes {'a' if is_tensor else 'no'} core_attention_bias"
                f" and {'may take' if kind == 'alibi' else 'no'} alibi_slopes"
            )
            raise ShapeError(message)
        check_bias(self, tensor, slopes, q.shape[-2])
        return Bias(kind, tensor, slopes)

    def _refuse_with_ranks(self, inference_params: InferenceParams | None) -> None:
        """Raise for what ranks that share the tokens of sequences do not compute."""
        refused = {
            "inference_params": inference_params is not None,
        }
        for what, is_given in refused.items():
            if is_given:
                message = f"{self.name}: context parallelism (cp_group) has no {what}"
                raise UnsupportedError(message)
        if is_in_graph():
            message = (
                f"{self._named()}: ranks that share the tokens of sequences (cp_group) do not attend in a compiled "
                "function; call the attention outside of it"
            )
            raise refusal(message)

    # Dense formats --------------------------------------------------------------------------------

    def _merged(
        self,
        heads: Any,
        how: Scores,
        fmt: str,
        lengths: Lengths,
        mask: Mask,
        *,
        recomputes: bool,
    ) -> Any:
        """Return the result with merged heads, and the largest scores if the caller asked for them."""
        if fmt == "thd":
            return self._merged_packed(heads, how, lengths, recomputes=recomputes)
        order = (1, 2, 0, 3) if fmt == "sbhd" else (0, 2, 1, 3)
        q, k, v = (tensor.permute(order) for tensor in heads)
        if how.rule.is_padded:
            kept = self._kept(q, k, mask, lengths)
            how = how.of(kept=kept)
            # Padding may hold anything. Its weights are zero, but zero times NaN is NaN.
            sides = (q, kept.queries), (k, kept.keys), (v, kept.keys)
            q, k, v = (one.masked_fill(~real[:, None, :, None], 0.0) for one, real in sides)
        elif how.rule.kind == "arbitrary":
            how = how.of(masked=self._masked(mask))
        check_scores(self, (*q.shape[:3], k.shape[2]), q.device, how)
        if self._context is not None:
            self._context.check(q, k, how)
        y = self._run(q, k, v, how, recomputes=recomputes)
        merged = y.permute((2, 0, 1, 3) if fmt == "sbhd" else (0, 2, 1, 3)).flatten(2)
        if not self.return_max_logit:
            return merged
        context = self._context
        return merged, (core if context is None else context).max_logits(q, k, how)

    def _masked(self, mask: Mask) -> torch.Tensor:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            message = f"{self.name}: attn_mask_type='arbitrary' needs an attention_mask, a tensor of torch.bool"
            raise (ShapeError if mask is None else DtypeError)(message)
        return mask if mask.dim() >= 4 else mask[(None,) * (4 - mask.dim())]

    def _kept(self, q: torch.Tensor, k: torch.Tensor, mask: Mask, lengths: Lengths) -> Kept:
        """Return which positions are real, from a padding mask or from cumulative lengths."""
        batch, sizes = q.shape[0], (q.shape[2], k.shape[2])
        if mask is None:
            if lengths.q is None or lengths.kv is None:
                message = f"{self.name}: mask types with padding need attention_mask, or cu_seqlens_q and cu_seqlens_kv"
                raise ShapeError(message)
            ends = lengths.q, lengths.kv
            check_lengths(self, ends, (batch, *sizes), q.device)
            found = [
                kept_of_lengths(end[: batch + 1], size)
                for end, size in zip(ends, sizes, strict=True)
            ]
            return Kept(*found)
        pair = check_padding(self, mask, (batch, *sizes), q.device)
        return Kept(~pair[0].reshape(batch, sizes[0]), ~pair[1].reshape(batch, sizes[1]))

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: Scores,
        *,
        recomputes: bool = False,
        packings: tuple[Packing, Packing] | None = None,
    ) -> torch.Tensor:
        """Attend, under the tracker of random numbers and with the kernels that are chosen."""
        context = self._context
        may_use_flash = self._kernels[0]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with self._forked(how.dropout), self._restricted(q):
                if packings is None:
                    attend = core.attend if context is None else context.attend
                    return attend(q, k, v, how, may_use_flash=may_use_flash)
                within = attend_packed if context is None else context.attend_packed
                return within(q, k, v, packings, how, may_use_flash=may_use_flash)

        if recomputes and torch.is_grad_enabled():
            tracker = self.get_rng_state_tracker
            return checkpoint(run, q, k, v, get_rng_state_tracker=tracker, use_reentrant=False)
        if how.dropout == 0.0 and all(self._kernels) and packings is None and not self._context:
            return core.attend(q, k, v, how)
        return run(q, k, v)

    def _forked(self, dropout: float) -> AbstractContextManager[Any]:
        if dropout == 0.0 or self.get_rng_state_tracker is None:
            return nullcontext()
        region: AbstractContextManager[Any] = self.get_rng_state_tracker().fork()
        return region

    def _restricted(self, q: torch.Tensor) -> AbstractContextManager[Any]:
        # On the CPU there is only one kernel.
        return core.backends(self._kernels, self.name) if q.is_cuda else nullcontext()

    # Packed sequences -----------------------------------------------------------------------------

    def _merged_packed(self, heads: Any, how: Scores, lengths: Lengths, *, recomputes: bool) -> Any:
        q, k, v = heads
        ranks = 1 if self._context is None else self._context.share.ranks
        packings = packings_of(self, (q, k), how.rule, lengths, ranks)
        of_q, of_k = packings
        sizes = (of_q.ends.numel() - 1, q.shape[1], of_q.longest, of_k.longest)
        check_scores(self, sizes, q.device, how)
        if self._context is not None:
            self._context.check_packed(q, k, packings, how)
        merged = self._run(q, k, v, how, recomputes=recomputes, packings=packings).flatten(1)
        if not self.return_max_logit:
            return merged
        find = max_logits_of_packed if self._context is None else self._context.max_logits_of_packed
        return merged, find(q, k, packings, how)

    # Inference ------------------------------------------------------------------------------------

    def _claim(self, params: InferenceParams) -> None:
        """Raise if another layer has kept its keys under this layer's number in the same step."""
        if params._writers.setdefault(self.layer_number, id(self)) != id(self):
            message = (
                f"{self.name}: another layer has kept its keys as layer_number={self.layer_number} in this step; give "
                "each layer that shares inference_params a layer_number of its own"
            )
            raise StateError(message)

    def _with_cache(
        self, heads: Any, how: Scores, fmt: str, lengths: Lengths, params: InferenceParams
    ) -> Any:
        """Attend to the keys and values of earlier steps and of this one."""
        if not how.rule.is_padded:
            message = f"{self.name}: inference_params needs a mask type with padding, got {how.rule.kind!r}"
            raise ShapeError(message)
        rule = how.rule
        if rule.kind == "padding_causal":  # new queries are the last tokens of their sequences
            rule = Rule("padding_causal_bottom_right", rule.left, rule.right, bottom_right=True)
        q, k, v = heads
        if k.shape[:-2] != q.shape[:-2]:
            message = (
                f"{self.name}: with inference_params, key_layer must have the new tokens that query_layer has, "
                f"{list(q.shape[:-2])} in {fmt}, got {list(k.shape[:-2])}"
            )
            raise ShapeError(message)
        batch, longest = params.extent_of(q, fmt, self.name)
        if not is_in_graph():  # a graph would be compiled anew for each layer
            self._claim(params)
        if self.layer_number not in params.cache_manager.cache:
            params.allocate_memory(self.layer_number)
        keys, values, ends_q, ends_kv, _, _ = params.step(self.layer_number, k, v, fmt)
        if params.is_paged:
            keys, values = params.pages_of_rows(self.layer_number, batch)
        keys, values = (cache[:batch, :longest].transpose(1, 2) for cache in (keys, values))
        kept_kv = kept_of_lengths(ends_kv[: batch + 1], longest)
        if fmt == "thd":
            size = lengths.longest_q if params.max_ctx_len is None else params.max_ctx_len
            packing = Packing(ends_q[: batch + 1], ends_q[: batch + 1], int(size or q.shape[0]))
            dense_q, kept_q = unpack(q, packing)
        else:
            dense_q = q.permute((1, 2, 0, 3) if fmt == "sbhd" else (0, 2, 1, 3))
            kept_q = kept_of_lengths(ends_q[: batch + 1], dense_q.shape[2])
        how = how.of(rule=rule, kept=Kept(kept_q, kept_kv))
        check_scores(self, (*dense_q.shape[:3], keys.shape[2]), q.device, how)
        y = self._run(dense_q, keys, values, how)
        if fmt == "thd":
            merged = pack(y, packing, q.shape[0]).flatten(1)
        else:
            merged = y.permute((2, 0, 1, 3) if fmt == "sbhd" else (0, 2, 1, 3)).flatten(2)
        return (merged, core.max_logits(dense_q, keys, how)) if self.return_max_logit else merged

    def extra_repr(self) -> str:
        """Heads, channels and mask."""
        return (
            f"num_attention_heads={self.num_attention_heads}, num_gqa_groups={self.num_gqa_groups}, "
            f"qkv_format={self.qkv_format}, attn_mask_type={self.attn_mask_type}"
        )
