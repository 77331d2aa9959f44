"""A transformer layer: attention and feed-forward block, with their residual connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import functional

from te_fast.attention.arguments import checked_probability
from te_fast.attention.block import Attending, Block, KnownCall
from te_fast.attention.inference import InferenceParams
from te_fast.attention.multi_head import CompositeModule, MultiheadAttention, Rotation, heads_of
from te_fast.attention.rules import check_mask
from te_fast.attention.simple import (
    NOTED_OF_ATTENTION,
    NOTED_OF_CORE,
    SimpleCall,
    simple_call,
)
from te_fast.attention.tail import Tail
from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.linear import Linear
from te_fast.layers.norm import LayerNorm, RMSNorm
from te_fast.layers.parameters import refuse
from te_fast.parallel.ranks import divided
from te_fast.runtime.arguments import check_layer_name
from te_fast.runtime.compiling import is_exporting
from te_fast.runtime.module_hooks import are_called_plainly
from te_fast.tensor.of_factory import in_shared_region

#: The attributes and children of a layer that decide whether a call runs in one autograd node.
_NOTED = (
    *("training", "hidden_dropout", "output_layernorm", "parallel_attention_mlp", "layer_type"),
    *("apply_residual_connection_post_layernorm", "drop_path", "sequence_parallel", "seq_length"),
    *("softcap", "self_attn_mask_type", "window_size", "bottom_right_diagonal"),
    *("self_attention", "layernorm_mlp"),
)
Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class DropPath(torch.nn.Module):
    """Drop whole samples along dimension 0 (https://arxiv.org/abs/1603.09382).

    Parameters
    ----------
    drop_prob : float, default = 0.0
        Probability of a drop, from 0 to 1; the other samples are divided by one minus this probability.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """Drop samples in training."""
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        kept = 1.0 - self.drop_prob
        if kept == 0.0:  # a quotient by zero would be NaN
            return hidden_state.masked_fill(hidden_state.new_ones((), dtype=torch.bool), 0.0)
        shape = (hidden_state.shape[0],) + (1,) * (hidden_state.dim() - 1)
        draws = torch.rand(shape, dtype=hidden_state.dtype, device=hidden_state.device)
        return hidden_state.div(kept) * (draws + kept).floor()


class TransformerLayer(CompositeModule):
    """Attention and feed-forward block, with their residual connections.

    Without dropout, projection, residual sum, norm and feed-forward block are one program. If self attention has no
    options other than a causal mask, the whole layer has one autograd node.

    Parameters
    ----------
    hidden_size, ffn_hidden_size, num_attention_heads : int
        Channels of input and result, channels inside of the feed-forward block, heads of queries.
    num_gqa_groups : int, optional
        Heads of keys and values.
    layernorm_epsilon : float, default = 1e-5
        Added to the variance by norms.
    hidden_dropout, attention_dropout : float, default = 0.1
        Probabilities of dropout before residual sums, and of weights of attention.
    init_method, output_layer_init_method : Callable, optional
        Initialise the weights that read a block's input, and the weights that compute its output.
    layer_number : int, optional
        Number of the layer, from 1.
    kv_channels : int, optional
        Channels of a head; ``hidden_size / num_attention_heads`` by default.
    self_attn_mask_type, window_size, bottom_right_diagonal : optional
        Mask of self attention, as of :class:`te_fast.pytorch.DotProductAttention`.
    softcap : float, default = 0.0
        Bound of the scores of all attention, as of :class:`te_fast.pytorch.DotProductAttention`.
    enc_dec_attn_mask_type, enc_dec_bottom_right_diagonal, enc_dec_window_size : optional
        The same of cross attention; ``no_mask`` by default.
    tp_group, tp_size, sequence_parallel, set_parallel_mode : optional
        Ranks that share the layer, as of :class:`te_fast.pytorch.MultiheadAttention`. With `sequence_parallel`, dropout
        before residual sums draws for a rank's own rows: give ranks different generators then.
    params_dtype : torch.dtype, optional
        Type of the parameters.
    get_rng_state_tracker : Callable, optional
        Gives the tracker of random numbers, for initialisation and the dropout of attention.
    fuse_wgrad_accumulation : bool, default = False
        Add the weights' gradients to their ``main_grad``; needs `fuse_qkv_params`.
    seq_length, micro_batch_size : int, optional
        Transformer Engine compiles for these sizes ahead of time; te_fast does not compile. With `sequence_parallel`,
        inputs must be a rank's share of `seq_length`.
    apply_residual_connection_post_layernorm : bool, default = False
        Residuals are the results of norms, instead of their inputs.
    output_layernorm : bool, default = False
        Normalise the result, instead of the input of self attention.
    parallel_attention_mlp : bool, default = False
        Attention and feed-forward block have the same input, and their results are added.
    layer_type : {'encoder', 'decoder'}, default = 'encoder'
        A decoder has cross attention between self attention and feed-forward block.
    drop_path_rate : float, default = 0.0
        Probability by which the path of a sample is dropped.
    fuse_qkv_params, qkv_weight_interleaved, rotary_pos_interleaved : bool
        As of :class:`te_fast.pytorch.MultiheadAttention`.
    zero_centered_gamma : bool, default = False
        Norms multiply by one plus their weight.
    ub_tp_comm_overlap : bool, default = False
        Userbuffers; not supported yet.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad : bool
        Kinds of Userbuffers; they have no effect without `ub_tp_comm_overlap`.
    bias : bool, default = True
        Have biases.
    activation, activation_params : optional
        As of :class:`te_fast.pytorch.LayerNormMLP`.
    normalization : {'LayerNorm', 'RMSNorm'}, default = 'LayerNorm'
        The norms.
    device : torch.device or str, default = 'cuda'
        Where the parameters are made.
    attn_input_format : {'sbhd', 'bshd', 'thd'}, default = 'sbhd'
        Order of the input's dimensions.
    name : str, optional
        Name in messages.
    qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type : optional
        As of :class:`te_fast.pytorch.MultiheadAttention`.

    Raises
    ------
    UnsupportedError
        For an argument that te_fast does not support yet.
    ShapeError
        If sizes do not fit, a name is unknown, or arguments contradict each other.
    ArgumentError
        If `tp_size` is not that of `tp_group`, or is above 1 without `set_parallel_mode`, or a probability is out of
        range.
    DtypeError
        If a size or a probability is no number.

    See Also
    --------
    MultiheadAttention : The first half of the layer.
    LayerNormMLP : The second half of the layer.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.randn(8, 2, 64))
    >>> y.shape
    torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        check_layer_name(self, name)
        self.name = name
        shown = self._shown = type(self).__name__ if name is None else name
        refuse(shown, {"ub_tp_comm_overlap": ub_tp_comm_overlap})
        heads_of(hidden_size, num_attention_heads, num_gqa_groups, shown)
        self._share_among_ranks(locals())
        _check_arguments(shown, locals())
        self._take(locals())
        returns_bias = not parallel_attention_mlp
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "tp_group": tp_group,
            "tp_size": self.tp_size,
            "sequence_parallel": self.sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "set_parallel_mode": set_parallel_mode,
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "bias": bias,
            "device": device,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
        }
        attention: dict[str, Any] = shared | {
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "kv_channels": self.kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "softmax_type": softmax_type,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
        }
        self._make_attention(attention, returns_bias=returns_bias)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            return_bias=returns_bias,
            activation=activation,
            activation_params=activation_params,
            name=self._name_of("layernorm_mlp"),
            **shared,
        )
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            self._make_output_norm(locals())
        self._find_tail()

    def _make_output_norm(self, given: dict[str, Any]) -> None:
        kind = RMSNorm if given["normalization"] == "RMSNorm" else LayerNorm
        options = {name: given[name] for name in ("params_dtype", "device", "zero_centered_gamma")}
        self.layernorm = kind(
            given["hidden_size"],
            eps=given["layernorm_epsilon"],
            sequence_parallel=self.sequence_parallel,
            **options,
        )

    def _take(self, given: dict[str, Any]) -> None:
        """Note the constructor's arguments that calls read, and those that Transformer Engine's module shows."""
        self.self_attn_mask_type: str = given["self_attn_mask_type"]
        self.window_size: tuple[int, int] | None = given["window_size"]
        self.bottom_right_diagonal: bool | None = given["bottom_right_diagonal"]
        self.softcap: float = given["softcap"]
        self.enc_dec_attn_mask_type: str = given["enc_dec_attn_mask_type"]
        self.enc_dec_window_size: tuple[int, int] | None = given["enc_dec_window_size"]
        self.enc_dec_bottom_right_diagonal: bool | None = given["enc_dec_bottom_right_diagonal"]
        self.layer_number: int | None = given["layer_number"]
        self.layer_type: str = given["layer_type"]
        self.output_layernorm: bool = given["output_layernorm"]
        self.apply_residual_connection_post_layernorm: bool = given[
            "apply_residual_connection_post_layernorm"
        ]
        self.parallel_attention_mlp: bool = given["parallel_attention_mlp"]
        self.kv_channels: int = (
            given["kv_channels"] or given["hidden_size"] // given["num_attention_heads"]
        )
        self.seq_length: int | None = given["seq_length"]
        self.get_rng_state_tracker = given["get_rng_state_tracker"]
        self.attn_input_format: str = given["attn_input_format"]
        self.softmax_type: str = given["softmax_type"]
        dropout = checked_probability(self._shown, "hidden_dropout", given["hidden_dropout"])
        self.hidden_dropout: float = dropout

    def _name_of(self, part: str) -> str | None:
        return None if self.name is None else f"{self.name}.{part}"

    def _make_attention(self, options: dict[str, Any], *, returns_bias: bool) -> None:
        # Without a norm, there is no norm's result to return.
        normed = options["return_layernorm_output"] and not self.output_layernorm
        self.self_attention = MultiheadAttention(
            **options | {"return_layernorm_output": normed},
            input_layernorm=not self.output_layernorm,
            attention_type="self",
            return_bias=returns_bias,
            name=self._name_of("self_attention"),
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                **options,
                attn_mask_type=self.enc_dec_attn_mask_type,
                input_layernorm=True,
                attention_type="cross",
                return_bias=True,
                name=self._name_of("inter_attention"),
            )

    def reset_fp8_meta_tensors(self) -> None:
        """Set scales and histories of the layers within to their initial values."""
        self._tell("reset_fp8_meta_tensors")

    def __getstate__(self) -> dict[str, Any]:
        """Leave native parts out; the copy makes its own."""
        made = ("_tail", "_block", "_known")
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled state, and make the native parts."""
        super().__setstate__(state)
        self._find_tail()

    # Forward --------------------------------------------------------------------------------------

    @in_shared_region
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Mask = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """Apply the layer.

        Parameters
        ----------
        hidden_states : torch.Tensor
            ``(s, b, hidden_size)``, ``(b, s, hidden_size)`` or ``(t, hidden_size)``.
        attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal : optional
            Mask of self attention, as of :class:`te_fast.pytorch.DotProductAttention`.
        encoder_output : torch.Tensor, optional
            The input of a decoder's cross attention.
        enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal : optional
            Mask of cross attention.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.
        rotary_pos_emb : torch.Tensor or tuple, optional
            Angles of :class:`te_fast.pytorch.RotaryPositionEmbedding`.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv : optional
            Places of the sequences; self attention uses those of queries for keys, too.
        checkpoint_core_attention, inference_params, core_attention_bias_type, core_attention_bias, alibi_slopes, \
fast_zero_fill, pad_between_seqs, thd_attention_policies, thd_attention_policy_dispatch, softcap : optional
            As :meth:`te_fast.pytorch.DotProductAttention.forward` takes them.

        Returns
        -------
        torch.Tensor
            Of the input's shape.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If tensors do not fit the layer or each other.
        UnsupportedError
            For what torch's kernels cannot do.
        StateError
            If FSDP2 has sharded a part of the layer alone and frees its bias.
        """
        if enc_dec_attn_mask_type is not None:  # an encoder does not read it
            check_mask(self._shown, enc_dec_attn_mask_type)
        has_options = (
            attention_mask is not None
            or self_attn_mask_type is not None
            or window_size is not None
            or bottom_right_diagonal is not None
            or inference_params is not None
            or core_attention_bias is not None
            or alibi_slopes is not None
            or softcap is not None
            or thd_attention_policies is not None
            or checkpoint_core_attention
            or core_attention_bias_type != "no_bias"
            or thd_attention_policy_dispatch != "auto"
        )
        if not has_options and not is_compiling():
            known: KnownCall | None = self.__dict__.get("_known")
            if known is not None:
                y = known(self, hidden_states, rotary_pos_emb, is_first_microbatch)
                if y is not None:
                    return y
        given: dict[str, Any] = {
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "softcap": _or_own(softcap, self.softcap),
            "attention_mask": attention_mask,
            "attn_mask_type": self_attn_mask_type or self.self_attn_mask_type,
            "window_size": _or_own(window_size, self.window_size),
            "bottom_right_diagonal": _or_own(bottom_right_diagonal, self.bottom_right_diagonal),
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_q,
            "pad_between_seqs": pad_between_seqs,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
        }
        crossing: dict[str, Any] = {
            "encoder_output": encoder_output,
            "thd_attention_policies": None,
            "thd_attention_policy_dispatch": "auto",
            "attention_mask": enc_dec_attn_mask,
            "attn_mask_type": enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
            "window_size": _or_own(enc_dec_window_size, self.enc_dec_window_size),
            "bottom_right_diagonal": _or_own(
                enc_dec_bottom_right_diagonal, self.enc_dec_bottom_right_diagonal
            ),
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_kv": max_seqlen_kv,
        }
        step = {"is_first_microbatch": is_first_microbatch, "rotary_pos_emb": rotary_pos_emb}
        return self._forward_general(hidden_states, step, given, crossing, notes=not has_options)

    def _forward_general(
        self,
        hidden_states: torch.Tensor,
        step: dict[str, Any],
        given: dict[str, Any],
        crossing: dict[str, Any],
        *,
        notes: bool,
    ) -> torch.Tensor:
        """Apply the layer with arguments of self attention, and those of cross attention that differ from them.

        With `notes`, the next call without options is compared with this one.
        """
        if not isinstance(hidden_states, torch.Tensor):
            message = f"{self._shown}: hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}"
            raise DtypeError(message)
        if self.sequence_parallel and self.seq_length is not None:
            self._check_share(hidden_states)
        hidden = hidden_states.contiguous()
        # torch has no autocast for the meta device.
        if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        tail = self._tail_for(hidden)
        if tail is not None:
            return self._run_with_tail(tail, hidden, step, given, notes=notes)
        # A trace reads these attributes itself, so that the graph serves only layers that have them, too.
        if is_compiling() and self._sums_alone() and self._has_tail_in_graphs():
            y = self._run_in_graph(hidden, step, given)
            if y is not None:
                return y
        attended = self.self_attention(hidden, **step, **given)
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden, step["is_first_microbatch"])
            return self._summed(attended, mlp, hidden)
        hidden = self._with_residual(attended, hidden, self.drop_path)
        if self.layer_type == "decoder":
            crossed = self.inter_attention(hidden, **step, **(given | crossing))
            hidden = self._with_residual(crossed, hidden, None)
        mlp = self.layernorm_mlp(hidden, step["is_first_microbatch"])
        output = self._with_residual(mlp, hidden, self.drop_path)
        return self.layernorm(output) if self.output_layernorm else output

    def _check_share(self, hidden: torch.Tensor) -> None:
        share = divided(self._shown, "seq_length", self.seq_length or 0, self.tp_size)
        if hidden.shape[0] != share:
            message = (
                f"{self._shown}: with sequence_parallel each of the {self.tp_size} ranks has its share of "
                f"seq_length = {self.seq_length}, {share} rows, got {hidden.shape[0]}"
            )
            raise ShapeError(message)

    def _tail_for(self, hidden: torch.Tensor) -> Tail | None:
        """Return the program of the part behind attention; None if something else must run in between."""
        if is_compiling() or not self._sums_alone():
            return None
        tail = self._find_tail()
        if tail is None or not are_called_plainly(self._modules["self_attention"]):
            return None
        return tail if tail.takes(hidden) else None

    def _has_tail_in_graphs(self) -> bool:
        """Tell whether graphs may hold the part behind attention as one program, which a trace finds as ``_tail``.

        Runs once in a trace, on the real layer.
        """
        if is_exporting() or not are_called_plainly(self._modules["self_attention"]):
            return False
        tail = self._find_tail()
        return tail is not None and tail.has_plain_layers()

    _has_tail_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _find_tail(self) -> Tail | None:
        """Return the program of the part behind attention, which belongs to the layers within; None if it has none.

        Every layer has it from the beginning: one without would not fit the graph of another.
        """
        modules = self._modules
        attention: Any = modules.get("self_attention")
        mlp: Any = modules.get("layernorm_mlp")
        if (
            type(attention) is not MultiheadAttention
            or type(mlp) is not LayerNormMLP
            or not self._is_plain()
        ):
            return None
        # A copy that began at a part refers to parts that have no attributes yet.
        proj: Any = attention.__dict__.get("_modules", {}).get("proj")
        if type(proj) is not Linear or not all("_handles" in part.__dict__ for part in (proj, mlp)):
            return None
        tail: Tail | None = self.__dict__.get("_tail")
        if tail is None or not tail.is_of(proj, mlp):
            tail = self.__dict__["_tail"] = Tail(proj, mlp, self._shown)
        return tail

    def _run_in_graph(
        self, hidden: torch.Tensor, step: dict[str, Any], given: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the layer's result in a trace, the part behind attention as one operator."""
        attention, is_first = self.self_attention, step["is_first_microbatch"]
        tail: Any = self._tail
        if not tail.joins(attention.proj, self.layernorm_mlp):
            return None
        params = tail.parameters_in_graph((attention.proj, self.layernorm_mlp), hidden)
        if params is None:
            return None
        context, _ = attention.attend((hidden, None), is_first, step["rotary_pos_emb"], given)
        return tail.call_in_graph(params, context, hidden, is_first)

    def _run_with_tail(
        self,
        tail: Tail,
        hidden: torch.Tensor,
        step: dict[str, Any],
        given: dict[str, Any],
        *,
        notes: bool,
    ) -> torch.Tensor:
        """Return the layer's result, from one autograd node if torch's kernel for attention needs no mask."""
        is_first, angles = step["is_first_microbatch"], step["rotary_pos_emb"]
        attention = self.self_attention
        call = simple_call(attention, hidden, angles, given)
        if call is None:
            context, _ = attention.attend((hidden, None), is_first, angles, given)
            return tail(context, hidden, is_first)
        if Block.takes(call.first, hidden, call.waves):
            block: Block | None = self.__dict__.get("_block")
            if block is None or not block.is_of(call.first, tail):
                block = self.__dict__["_block"] = Block(call.first, tail)
            between = block.attending(hidden, call)
            if between is not None:
                y = block(hidden, between, is_first)
                if y is not None:
                    if notes:
                        self._note(block, hidden, call, between)
                    return y
        return tail(call.attend(hidden, is_first), hidden, is_first)

    def _note(
        self, block: Block, hidden: torch.Tensor, call: SimpleCall, between: Attending
    ) -> None:
        attention = self.self_attention
        modules = (
            (attention, NOTED_OF_ATTENTION),
            (attention.core_attention, NOTED_OF_CORE),
        )
        known = KnownCall(block, hidden, call, between, (self, _NOTED), modules)
        self.__dict__["_known"] = known

    def _is_plain(self) -> bool:
        return not (
            self.output_layernorm
            or self.parallel_attention_mlp
            or self.apply_residual_connection_post_layernorm
            or self.layer_type == "decoder"
            or (self.drop_path is not None and self.training)
        )

    def _sums_alone(self) -> bool:
        """Tell whether there is nothing but sums behind attention and the feed-forward block."""
        return self._is_plain() and not (self.training and self.hidden_dropout > 0.0)

    def _with_residual(
        self, outs: Any, residual: torch.Tensor, drop_path: torch.nn.Module | None
    ) -> torch.Tensor:
        """Return the sum of a block's result, bias and residual; the block may return the residual itself."""
        out, bias, *normed = outs
        if not is_compiling():
            self._check_has_memory(bias)
        return self._summed(out, bias, normed[0] if normed else residual, drop_path)

    def _check_has_memory(self, bias: torch.Tensor | None) -> None:
        """Refuse a bias that a part has returned, and whose memory FSDP2 has freed at the end of the part's forward."""
        if bias is not None and bias.numel() != 0 and bias.untyped_storage().nbytes() == 0:
            message = (
                f"{self._shown}: the residual sum reads the bias of a part of the layer that is sharded alone, and "
                "FSDP2 has freed it; shard the whole layer by fully_shard(layer), or its parts with "
                "reshard_after_forward=False"
            )
            raise StateError(message)

    def _summed(
        self,
        out: torch.Tensor,
        other: torch.Tensor | None,
        residual: torch.Tensor,
        drop_path: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        if other is not None and other.numel() != 0:
            out = out + other
        out = functional.dropout(out, self.hidden_dropout, training=self.training)
        drop_path = self.drop_path if self.parallel_attention_mlp else drop_path
        return residual + (out if drop_path is None else drop_path(out))


def _or_own(given: Any, own: Any) -> Any:
    """Return an argument of a call, or the layer's own if it is None."""
    return own if given is None else given


def _check_arguments(layer: str, given: dict[str, Any]) -> None:
    """Raise for arguments that are unknown, or contradict each other."""
    check_mask(layer, given["self_attn_mask_type"], given["window_size"])
    check_mask(layer, given["enc_dec_attn_mask_type"], given["enc_dec_window_size"])
    checked_probability(layer, "drop_path_rate", given["drop_path_rate"])
    if given["layer_type"] not in ("encoder", "decoder"):
        message = f"{layer}: layer_type must be 'encoder' or 'decoder', got {given['layer_type']!r}"
        raise ShapeError(message)
    if given["normalization"] not in ("LayerNorm", "RMSNorm"):
        message = f"{layer}: normalization must be 'LayerNorm' or 'RMSNorm', got {given['normalization']!r}"
        raise ShapeError(message)
    if given["fuse_wgrad_accumulation"] and not given["fuse_qkv_params"]:
        message = f"{layer}: fuse_wgrad_accumulation needs fuse_qkv_params=True"
        raise ShapeError(message)
    if given["parallel_attention_mlp"]:
        contradicting = {
            "layer_type='decoder'": given["layer_type"] == "decoder",
            "output_layernorm": given["output_layernorm"],
            "apply_residual_connection_post_layernorm": given[
                "apply_residual_connection_post_layernorm"
            ],
        }
        for argument, is_set in contradicting.items():
            if is_set:
                message = f"{layer}: parallel_attention_mlp does not go with {argument}"
                raise ShapeError(message)
