"""Multi-head attention: projections, rotation, norms of heads, attention, projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

from te_fast.attention.arguments import angles_of_heads, check_angles
from te_fast.attention.dot_product import DotProductAttention
from te_fast.attention.inference import InferenceParams, check_caches
from te_fast.attention.rope import Heads, Waves, rotate, split_rotated, waves_of
from te_fast.attention.rules import CPLoadBalancingStrategy, check_mask
from te_fast.errors import ArgumentError, ShapeError, UnsupportedError
from te_fast.layers.layernorm_linear import LayerNormLinear
from te_fast.layers.linear import Linear
from te_fast.layers.norm import LayerNorm, RMSNorm
from te_fast.layers.parameters import check_sizes, refuse_userbuffers
from te_fast.ops.basic.l2normalization import L2Normalization
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import check_group, divided, reduced_sharing, size_of_group
from te_fast.runtime.arguments import check_layer_name
from te_fast.runtime.module_hooks import are_called_plainly

Rotation = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class CompositeModule(torch.nn.Module):
    """A module of layers, which passes settings on to them."""

    #: Name in messages.
    _shown: str
    tp_group: Any
    tp_size: int
    sequence_parallel: bool

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module."""
        self.__dict__[name] = value

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of every module inside that has it."""
        for child in self.modules():
            if child is not self and hasattr(child, method):
                getattr(child, method)(*args)

    def _share_among_ranks(self, given: dict[str, Any]) -> None:
        """Take a constructor's arguments of tensor parallelism.

        Raises
        ------
        ArgumentError
            If `tp_size` is above 1 without `set_parallel_mode`.
        """
        self.tp_group = given["tp_group"]
        self.tp_size = size_of_group(self._shown, self.tp_group, given["tp_size"])
        self.sequence_parallel = self.tp_size > 1 and bool(given["sequence_parallel"])
        if self.tp_size > 1 and not given["set_parallel_mode"]:
            message = (
                f"{self._shown}: tp_size = {self.tp_size} needs set_parallel_mode=True, else every rank has the "
                "projections of all heads"
            )
            raise ArgumentError(message)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that share the layers within, before the first forward.

        Parameters
        ----------
        tp_group : torch.distributed.ProcessGroup or None
            A group of ``tp_size`` ranks; None means one rank.

        Raises
        ------
        RanksError
            If it has another number of ranks, or this one is not in it.
        """
        check_group(self._shown, tp_group, self.tp_size)
        self._tell("set_tensor_parallel_group", tp_group)
        self.tp_group = tp_group

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let deep copies share process groups."""
        return reduced_sharing(super().__reduce_ex__(protocol), [self.tp_group])

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the ranks that share the tokens of sequences, as :class:`te_fast.pytorch.DotProductAttention` takes them.

        Raises
        ------
        ShapeError, DtypeError
            If the arguments do not fit.
        RanksError
            If this rank is not in a group.
        """
        arguments = (cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy)
        self._tell("set_context_parallel_group", *arguments)


def heads_of(hidden: int, heads: int, groups: int | None, layer: str) -> int:
    """Return the number of heads of keys and values.

    Raises
    ------
    ShapeError
        If the heads of queries are not a multiple of this number.
    """
    check_sizes(layer, hidden_size=hidden, num_attention_heads=heads)
    found = heads if groups is None else groups
    check_sizes(layer, num_gqa_groups=found)
    if found == 0 or heads % found:
        message = f"{layer}: num_attention_heads must be a multiple of num_gqa_groups, got {heads} and {found}"
        raise ShapeError(message)
    return found


class MultiheadAttention(CompositeModule):
    """Attention with its projections.

    Parameters
    ----------
    hidden_size, num_attention_heads : int
        Channels of input and result, and heads of queries.
    kv_channels : int, optional
        Channels of a head; ``hidden_size / num_attention_heads`` by default.
    attention_dropout : float, default = 0.1
        Probability by which a weight is dropped in training.
    layernorm_epsilon : float, default = 1e-5
        Added to the variance by the input's norm.
    init_method, output_layer_init_method : Callable, optional
        Initialise the weights of queries, keys and values, and the weight of the last projection.
    layer_number : int, optional
        Number of the layer, from 1: names its part of a key-value cache.
    attn_mask_type, window_size, bottom_right_diagonal, softcap : optional
        As of :class:`te_fast.pytorch.DotProductAttention`.
    tp_group : torch.distributed.ProcessGroup, optional
        Ranks that share the layer; each has a part of the heads. If it is missing and `tp_size` is above 1, set it by
        :meth:`set_tensor_parallel_group`.
    tp_size : int, default = 1
        Number of these ranks; it divides the heads of queries, and those of keys and values.
    sequence_parallel : bool, default = False
        Each rank has rows of its own of input and result, which are split along their first dimension.
    set_parallel_mode : bool, default = False
        Make the projections column- and row-parallel; several ranks need it.
    num_gqa_groups : int, optional
        Heads of keys and values.
    fuse_wgrad_accumulation : bool, default = False
        Add the weights' gradients to their ``main_grad``.
    get_rng_state_tracker : Callable, optional
        Gives the tracker of random numbers, for initialisation and dropout.
    params_dtype : torch.dtype, optional
        Type of the parameters.
    return_bias : bool, default = False
        Return the last projection's bias beside the result, not added.
    return_layernorm_output : bool, default = False
        With `input_layernorm`, return the norm's result as well.
    input_layernorm : bool, default = False
        Normalise the input.
    attention_type : {'self', 'cross'}, default = 'self'
        Where keys and values come from: the input, or ``encoder_output``.
    fuse_qkv_params : bool, default = False
        Have one weight for queries, keys and values instead of three.
    zero_centered_gamma : bool, default = False
        The norm multiplies by one plus its weight.
    qkv_weight_interleaved : bool, default = True
        Order of rows in the fused weight. True: the rows of each group lie together (its queries, its key, its value).
        False: all queries, then all keys, then all values, as always without `fuse_qkv_params`.
    rotary_pos_interleaved : bool, default = False
        Which channels rotary embeddings turn together.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad : bool
        Userbuffers; not supported yet.
    bias : bool, default = True
        Have biases.
    normalization : {'LayerNorm', 'RMSNorm'}, default = 'LayerNorm'
        The input's norm.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made.
    qkv_format : {'sbhd', 'bshd', 'thd'}, default = 'sbhd'
        Order of the input's dimensions.
    name : str, optional
        Name in messages.
    qk_norm_type : {'L2Normalization', 'RMSNorm', 'LayerNorm'}, optional
        Normalise the heads of queries and keys. If ranks share the layer, each rank has the gradients of its own heads.
        The norms' parameters then have ``sequence_parallel`` set, so that frameworks add the gradients up.
    qk_norm_eps : float, default = 1e-6
        Added to the variance by these norms.
    qk_norm_before_rope : bool, default = False
        Normalise before rotary embeddings, not after them.
    seq_length, micro_batch_size : int, optional
        Transformer Engine compiles for these sizes ahead of time; te_fast does not compile.
    softmax_type : str, default = 'vanilla'
        As of :class:`te_fast.pytorch.DotProductAttention`.

    Raises
    ------
    UnsupportedError
        For an argument that te_fast does not support yet.
    ShapeError
        If sizes do not fit, or a name is unknown.
    ArgumentError
        If `tp_size` is not that of `tp_group`, or is above 1 without `set_parallel_mode`.

    See Also
    --------
    DotProductAttention : Attention alone.
    TransformerLayer : A whole layer.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layer = te.MultiheadAttention(64, 4, attention_dropout=0.0, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.randn(8, 2, 64))
    >>> y.shape
    torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        check_layer_name(self, name)
        self.name = name
        shown = self._shown = type(self).__name__ if name is None else name
        refuse_userbuffers(shown, locals())
        self.num_gqa_groups = heads_of(hidden_size, num_attention_heads, num_gqa_groups, shown)
        self._share_among_ranks(locals())
        self._check(attention_type, layer_number, return_layernorm_output and not input_layernorm)
        self._take(locals())
        self._make_head_norms(qk_norm_type, qk_norm_eps, device, params_dtype)
        shared: dict[str, Any] = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": self.tp_size,
            "sequence_parallel": self.sequence_parallel,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
        }
        first = {
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        norm = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        self._make_projections(hidden_size, norm, shared | first, is_split=not fuse_qkv_params)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.hidden_size_per_attention_head,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            get_rng_state_tracker=get_rng_state_tracker,
            tp_group=tp_group,
            tp_size=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            layer_number=self.layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
            name=self._name_of("core_attention"),
            device=device,
        )
        self.proj = Linear(
            self.hidden_size_q,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            name=self._name_of("proj"),
            **shared,
        )

    def _take(self, given: dict[str, Any]) -> None:
        """Note the constructor's arguments that calls read, and those that Transformer Engine's module shows."""
        self.qkv_format: str = given["qkv_format"]
        check_mask(self._shown, given["attn_mask_type"], given["window_size"])
        self.attn_mask_type: str = given["attn_mask_type"]
        self.window_size: tuple[int, int] | None = given["window_size"]
        self.bottom_right_diagonal: bool | None = given["bottom_right_diagonal"]
        self.softcap: float = given["softcap"]
        self.layer_number: int = given["layer_number"] or 1
        self.input_layernorm: bool = given["input_layernorm"]
        self.attention_type: str = given["attention_type"]
        self.return_layernorm_output: bool = given["return_layernorm_output"]
        self.return_bias: bool = given["return_bias"]
        self.get_rng_state_tracker = given["get_rng_state_tracker"]
        self.params_dtype: torch.dtype = given["params_dtype"] or torch.get_default_dtype()
        heads: int = given["num_attention_heads"]
        self.num_attention_heads = heads
        self.num_gqa_groups_per_partition = divided(
            self._shown, "num_gqa_groups", self.num_gqa_groups, self.tp_size
        )
        self.num_attention_heads_per_partition = heads // self.tp_size
        self.softmax_type: str = given["softmax_type"]
        is_fused = bool(given["fuse_qkv_params"])
        self.qkv_weight_interleaved = is_fused and bool(given["qkv_weight_interleaved"])
        self.rotary_pos_interleaved = bool(given["rotary_pos_interleaved"])
        self.qk_norm_before_rope: bool = given["qk_norm_before_rope"]
        channels: int = given["kv_channels"] or given["hidden_size"] // heads
        check_sizes(self._shown, kv_channels=channels)
        self.hidden_size_per_attention_head = channels
        self.hidden_size_q, self.hidden_size_kv = channels * heads, channels * self.num_gqa_groups
        self._heads = Heads(
            self.num_attention_heads_per_partition,
            self.num_gqa_groups_per_partition,
            channels,
            self.qkv_weight_interleaved,
        )

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return no share of the module's own, since only its layers have parameters.

        Raises
        ------
        UnsupportedError
            For a matrix of a rank's queries, keys and values that are not interleaved: it is not a part of the whole
            matrix.
        """
        names = ("qkv", "layernorm_qkv", "key_value")
        joined = [name for name in names if hasattr(getattr(self, name, None), "weight")]
        if self.tp_size > 1 and joined and not self.qkv_weight_interleaved:
            message = (
                f"{self._shown}: {joined[0]}.weight has this rank's queries, keys and values in sequence, so that "
                "ranks' shares do not add up to the whole; use qkv_weight_interleaved=True, or fuse_qkv_params=False"
            )
            raise UnsupportedError(message)
        return {}

    def _check(self, attention_type: str, layer_number: int | None, lacks_norm: bool) -> None:
        if attention_type not in ("self", "cross"):
            message = (
                f"{self._shown}: attention_type must be 'self' or 'cross', got {attention_type!r}"
            )
            raise ShapeError(message)
        check_sizes(self._shown, layer_number=1 if layer_number is None else layer_number)
        if layer_number == 0:
            message = f"{self._shown}: layer_number must be 1 or more, got {layer_number}"
            raise ShapeError(message)
        if lacks_norm:
            message = f"{self._shown}: return_layernorm_output needs input_layernorm"
            raise ShapeError(message)

    def _name_of(self, part: str) -> str | None:
        return None if self.name is None else f"{self.name}.{part}"

    def _make_head_norms(
        self, kind: str | None, eps: float, device: Any, dtype: torch.dtype | None
    ) -> None:
        kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        self.q_norm: torch.nn.Module | None = None
        self.k_norm: torch.nn.Module | None = None
        if kind is None:
            return
        if kind == "L2Normalization":
            self.q_norm = self.k_norm = L2Normalization(eps=eps)
            return
        if not isinstance(kind, str) or kind not in kinds:
            known = ", ".join(("L2Normalization", *kinds))
            message = f"{self._shown}: qk_norm_type must be None or one of {known}, got {kind!r}"
            raise ShapeError(message)
        size = self.hidden_size_per_attention_head
        options: dict[str, Any] = {"eps": eps, "device": device, "params_dtype": dtype}
        if self.tp_size > 1:
            options["sequence_parallel"] = (
                True  # gradients of this rank's heads are partial sums, as those of a rank's rows are
            )
        self.q_norm = kinds[kind](size, **options)
        self.k_norm = kinds[kind](size, **options)

    def _make_projections(
        self, hidden: int, norm: dict[str, Any], shared: dict[str, Any], *, is_split: bool
    ) -> None:
        q, kv = self.hidden_size_q, self.hidden_size_kv
        if self.attention_type == "self":
            parts: Any = {"query": q, "key": kv, "value": kv} if is_split else None
            outs = q + 2 * kv
            if self.input_layernorm:
                name = self._name_of("layernorm_linear_qkv")
                self.layernorm_qkv = LayerNormLinear(
                    hidden, outs, parameters_split=parts, name=name, **norm, **shared
                )
            else:
                name = self._name_of("linear_qkv")
                self.qkv = Linear(hidden, outs, parameters_split=parts, name=name, **shared)
            return
        if self.input_layernorm:
            parts, name = (("query",) if is_split else None), self._name_of("layernorm_linear_q")
            self.layernorm_query = LayerNormLinear(
                hidden, q, parameters_split=parts, name=name, **norm, **shared
            )
        else:
            self.query_layer = Linear(hidden, q, **shared)
        parts, name = (("key", "value") if is_split else None), self._name_of("linear_kv")
        self.key_value = Linear(hidden, 2 * kv, parameters_split=parts, name=name, **shared)

    # Forward --------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Rotation = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        hidden_states : torch.Tensor
            ``(s, b, hidden_size)``, ``(b, s, hidden_size)`` or ``(t, hidden_size)``.
        encoder_output : torch.Tensor, optional
            The tensor that cross attention computes keys and values from, in the same format.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.
        rotary_pos_emb : torch.Tensor or tuple, optional
            Angles of :class:`te_fast.pytorch.RotaryPositionEmbedding`; a tuple has those of queries and those of keys.
        attention_mask, attn_mask_type, window_size, bottom_right_diagonal, checkpoint_core_attention, \
inference_params, core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, \
cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, \
thd_attention_policies, thd_attention_policy_dispatch, softcap : optional
            As :meth:`te_fast.pytorch.DotProductAttention.forward` takes them. Cross attention reads the
            positions of its queries from `inference_params`, and keeps no keys.

        Returns
        -------
        torch.Tensor or tuple
            Of the input's shape; then, with `return_bias`, the bias; then, with `return_layernorm_output`, the norm's
            result.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If tensors do not fit the layer or each other.
        UnsupportedError
            For what torch's kernels cannot do.
        """
        given: dict[str, Any] = {
            "attention_mask": attention_mask,
            "attn_mask_type": self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            "window_size": self.window_size if window_size is None else window_size,
            "bottom_right_diagonal": self.bottom_right_diagonal
            if bottom_right_diagonal is None
            else bottom_right_diagonal,
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
            "softcap": self.softcap if softcap is None else softcap,
        }
        sources = (hidden_states, encoder_output)
        context, normed = self.attend(sources, is_first_microbatch, rotary_pos_emb, given)
        out: Any = self.proj(context, is_first_microbatch=is_first_microbatch)
        if normed is None:
            return out
        return (*out, normed) if isinstance(out, tuple) else (out, normed)

    _called_forward = forward

    def attend(
        self,
        sources: tuple[torch.Tensor, torch.Tensor | None],
        is_first_microbatch: bool | None,
        rotary_pos_emb: Rotation,
        given: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention up to the last projection.

        Parameters
        ----------
        sources : tuple of torch.Tensor
            Input, and the encoder's output for cross attention.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.
        rotary_pos_emb : torch.Tensor or tuple, optional
            Angles.
        given : dict
            Arguments of the attention within.

        Returns
        -------
        tuple
            Heads merged, and the norm's result if it is to be returned, else None.
        """
        hidden, encoder_output = sources
        normed = None
        if self.attention_type == "self":
            first = self.layernorm_qkv if self.input_layernorm else self.qkv
            mixed: Any = first(hidden, is_first_microbatch=is_first_microbatch)
            if self.return_layernorm_output:
                mixed, normed = mixed
            heads = self._split(mixed, rotary_pos_emb, given, is_fresh=is_fresh(first))
        else:
            if encoder_output is None:
                message = f"{self._shown}: cross attention needs encoder_output"
                raise ShapeError(message)
            first = self.layernorm_query if self.input_layernorm else self.query_layer
            queries: Any = first(hidden, is_first_microbatch=is_first_microbatch)
            if self.return_layernorm_output:
                queries, normed = queries
            mixed = self.key_value(encoder_output, is_first_microbatch=is_first_microbatch)
            heads = self._split_cross(queries, mixed, rotary_pos_emb, given)
            # The encoder's keys come whole with every call; caches are those of self attention.
            given = given | {"inference_params": None}
        context = self.core_attention(*heads, **given)
        return context, normed

    def _split(
        self, mixed: torch.Tensor, angles: Rotation, given: dict[str, Any], *, is_fresh: bool
    ) -> Any:
        """Return queries, keys and values of their product, rotated and normalised."""
        has_norms = self.q_norm is not None and self.k_norm is not None
        if angles is None or (has_norms and self.qk_norm_before_rope):
            q, k, v = self._heads.split(mixed)
            return self._placed(q, k, v, angles, given)
        of_q, of_k = angles_of_heads(angles)
        waves = self._waves(of_q, mixed.shape, given, "q")
        others = waves
        if of_k is not of_q or given.get("cu_seqlens_q") is not given.get("cu_seqlens_kv"):
            others = self._waves(of_k, mixed.shape, given, "kv")
        q, k, v = split_rotated(
            mixed,
            (waves, others),
            self._heads,
            interleaved=self.rotary_pos_interleaved,
            in_place=is_fresh,
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _split_cross(
        self, queries: torch.Tensor, mixed: torch.Tensor, angles: Rotation, given: dict[str, Any]
    ) -> Any:
        groups, d = self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head
        q = queries.unflatten(-1, (self.num_attention_heads_per_partition, d))
        if self.qkv_weight_interleaved:
            k, v = mixed.unflatten(-1, (groups, 2, d)).unbind(-2)
        else:
            k, v = mixed.unflatten(-1, (2, groups, d)).unbind(-3)
        return self._placed(q, k, v, angles, given)

    def _placed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: Rotation,
        given: dict[str, Any],
    ) -> Any:
        """Rotate and normalise queries and keys."""
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            of_q, of_k = angles_of_heads(angles)
            interleaved = self.rotary_pos_interleaved
            q = rotate(q, self._waves(of_q, q.shape, given, "q"), interleaved=interleaved)
            k = rotate(k, self._waves(of_k, k.shape, given, "kv"), interleaved=interleaved)
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _waves(
        self, angles: torch.Tensor, shape: torch.Size, given: dict[str, Any], side: str
    ) -> Waves:
        """Return cosines and sines; in a key-value cache, sequences begin where the previous step ended."""
        params = given.get("inference_params")
        starts = None
        if params is not None:
            check_caches(self._shown, params)
            if self.attention_type == "self":
                side = "q"  # lengths of keys count kept ones, too; the new keys are those of the queries
            starts = params.get_seqlens_pre_step() if side == "q" else None
        ends = None
        if self.qkv_format == "thd":
            ends, padded = given.get(f"cu_seqlens_{side}"), given.get(f"cu_seqlens_{side}_padded")
            if given.get("pad_between_seqs") is not False and padded is not None:
                ends = padded
            if ends is None:
                message = (
                    f"{self._shown}: qkv_format='thd' needs cu_seqlens_{side} for rotary_pos_emb"
                )
                raise ShapeError(message)
        kept = None if starts is None else params
        check_angles(
            self._shown, angles, kept, given.get(f"cu_seqlens_{side}") if ends is not None else None
        )
        how: dict[str, Any] = {"interleaved": self.rotary_pos_interleaved}
        ranks: Any = getattr(self.core_attention, "_context", None)
        if ranks is not None:
            how["share"] = ranks.share
        return waves_of(angles, shape, self.qkv_format, starts, ends, **how)


def is_fresh(layer: torch.nn.Module) -> bool:
    """Tell whether only the caller has a reference to a layer's result."""
    return (
        type(layer) in (Linear, LayerNormLinear)
        and are_called_plainly(layer)
        and not _is_seen_by_a_mode()
    )


def _is_seen_by_a_mode() -> bool:
    """Tell whether a mode of torch functions sees results, and may keep them; that of default devices keeps none."""
    if is_compiling():
        return False
    modes = [
        torch._C._get_function_stack_at(place)
        for place in range(torch._C._len_torch_function_stack())
    ]
    return any([not isinstance(mode, DeviceContext) for mode in modes])
