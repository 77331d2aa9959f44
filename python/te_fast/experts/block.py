"""A mixture of experts, which replaces a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_fast.errors import ArgumentError, DtypeError, ShapeError
from te_fast.experts import exported
from te_fast.experts.balancing_loss import balancing_loss
from te_fast.experts.exchange import expert_ranks
from te_fast.experts.mixture import Mixture
from te_fast.experts.program import ExpertsProgram, Router, may_replace
from te_fast.graphs.refusal import refusal
from te_fast.moe.choice import MOST_EXPERTS
from te_fast.moe.router import (
    choice_of,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from te_fast.ops.basic.grouped_linear import GroupedLinear
from te_fast.ops.basic.scaled import ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from te_fast.ops.common import NATIVE_TYPES, parameter_options, to_real
from te_fast.ops.sequential import Sequential
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import reduced_sharing
from te_fast.runtime.arguments import check_numbers, check_positive_sizes
from te_fast.runtime.compiling import is_any_autocast_enabled, is_unseen
from te_fast.tensor.of_factory import in_shared_region

#: Activations by name, and halves of their input.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "swiglu": (ScaledSwiGLU, 2),
    "clamped_qgeglu": (ScaledClampedQGeGLU, 2),
    "situglu": (ScaledSiTUGLU, 2),
    "srelu": (ScaledSReLU, 1),
}

#: Types of a router that a program converts to float32.
_ROUTER_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_AS_IT_IS = nullcontext()

#: Arguments of :func:`te_fast.moe.router.choice_of` between the number of experts and the bias.
_How = tuple[int, bool, int | None, int | None, float | None, str]


class MoE(torch.nn.Module):
    """A mixture of experts: router, experts' rows, two grouped products around an activation, and their sum.

    A token goes to `topk` experts, whose results are summed with the router's probabilities. The experts run in FP8
    inside :class:`te_fast.pytorch.autocast`, the router in FP32. The numbers of the experts' rows stay on the device,
    so that the host never waits and CUDA graphs can capture the block.

    Router, permutation, experts and sum are one program with one autograd node. In some calls torch's operations route
    the tokens before the rest runs: if the tokens have another type than the experts compute in, if ranks share the
    experts, if the call is traced, or if the router is no plain parameter. If `experts` or an operation in it has a
    hook, or the device has no kernels for the products of all experts, torch's operations route, too, and the
    operations are called one by one. The router's sums in FP32 then have another order.

    Parameters
    ----------
    hidden_size, ffn_hidden_size : int
        Channels of a token, and inside of an expert. In FP8 both are multiples of 16.
    num_experts, topk : int
        Number of experts, and number of experts of each token.
    activation : {'swiglu', 'clamped_qgeglu', 'situglu', 'srelu'}
        The activation between the products; its result is multiplied by the probabilities.
    score_function, use_pre_softmax, num_groups, group_topk, scaling_factor : optional
        As of :func:`te_fast.pytorch.router.fused_topk_with_score_function`.
    expert_bias : bool, default = False
        Have a bias of each expert that affects only the choice of experts; :meth:`update_expert_bias` changes it.
    aux_loss_coeff : float, default = 0.0
        Weight of the loss that balances experts. If it is not 0, the block returns that loss, too.
    bias : bool, default = False
        Have biases in the first product of each expert. The second product has no biases, since the probabilities would
        have to scale them (``scale_bias`` of :class:`te_fast.pytorch.ops.GroupedLinear`).
    device, dtype : optional
        Where the parameters are made, and the type of the experts' parameters; the router's are float32.
    accumulate_into_main_grad, delay_wgrad_compute, single_grouped_weight : bool, default = False
        As of :class:`te_fast.pytorch.ops.GroupedLinear`.
    activation_recompute_in_mlp : bool, default = False
        Keep only the activation's input, and compute its result again in backward. Not with delayed scaling.
    ep_group : torch.distributed.ProcessGroup, optional
        Ranks that share the experts: each has the same number of them, in the order of the ranks, and its own tokens.
        Rows travel to their experts' ranks and back, and the host waits for the numbers of rows. All ranks have the
        same router, and each rank has the router's gradients of its own tokens. The experts' gradients are those of all
        tokens, and their parameters have ``allreduce = False``, as Megatron-LM marks them. The loss that balances
        experts covers a rank's own tokens.

    Attributes
    ----------
    router : torch.nn.Parameter
        float32 ``(num_experts, hidden_size)``.
    experts : te_fast.pytorch.ops.Sequential
        The two products and the activation between them, of this rank's experts.

    Raises
    ------
    ArgumentError
        If an argument has an unknown value.
    ShapeError
        If a size is not 1 or more, `topk` is above `num_experts`, groups do not fit the experts, or ranks cannot have
        the same number of experts.
    DtypeError
        If an argument has the wrong class.
    RanksError
        If this rank is not in `ep_group`; in a forward, if ranks do not call the block alike, or one is gone.

    See Also
    --------
    te_fast.pytorch.ops.GroupedLinear : The products of its experts.
    moe_permute : Its permutation.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> block = te.MoE(32, 48, num_experts=4, topk=2, device="cpu")
    >>> with te.autocast():
    ...     y = block(torch.ones(2, 8, 32))
    >>> y.shape
    torch.Size([2, 8, 32])
    """

    expert_bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        activation: str = "swiglu",
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        aux_loss_coeff: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        single_grouped_weight: bool = False,
        activation_recompute_in_mlp: bool = False,
        ep_group: Any = None,
    ) -> None:
        super().__init__()
        check_positive_sizes(
            "MoE", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, num_experts=num_experts
        )
        check_numbers("MoE", aux_loss_coeff=aux_loss_coeff)
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            known = ", ".join(map(repr, _ACTIVATIONS))
            message = f"MoE: activation must be one of {known}, got {activation!r}"
            raise ArgumentError(message)
        if expert_bias and score_function == "softmax":
            message = "MoE: expert_bias goes with score_function 'sigmoid' or 'sqrtsoftplus', got 'softmax'"
            raise ArgumentError(message)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts, self.topk = num_experts, topk
        self.activation, self.score_function = activation, score_function
        self.use_pre_softmax = use_pre_softmax
        self.num_groups, self.group_topk = num_groups, group_topk
        self.scaling_factor, self.aux_loss_coeff = scaling_factor, aux_loss_coeff
        self._router: tuple[tuple[_How, bool, bool], Router] | None = None
        options = parameter_options(device, dtype, "MoE")
        of_router = {**options, "dtype": torch.float32}
        self.router = torch.nn.Parameter(torch.empty(num_experts, hidden_size, **of_router))
        zeros = torch.zeros(num_experts, **of_router) if expert_bias else None
        choice_of(num_experts, *self._how, zeros)
        self.register_buffer("expert_bias", zeros)
        counts = None if zeros is None else torch.zeros_like(zeros, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.ep_group = ep_group
        self._ranks = expert_ranks("MoE", ep_group, num_experts)
        self._mixture = Mixture(type(self).__name__, self._ranks)
        local = num_experts if self._ranks is None else self._ranks.num_local
        make, halves = _ACTIVATIONS[activation]
        both: dict[str, Any] = {
            **options,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "delay_wgrad_compute": delay_wgrad_compute,
            "single_grouped_weight": single_grouped_weight,
        }
        self.experts = Sequential(
            GroupedLinear(local, hidden_size, halves * ffn_hidden_size, bias=bias, **both),
            make(activation_recompute_in_mlp=activation_recompute_in_mlp),
            GroupedLinear(local, ffn_hidden_size, hidden_size, bias=False, **both),
        )
        if self._ranks is not None:
            for parameter in self.experts.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
        if not self.router.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the router, and set the experts' bias and counts to zero.

        A router on the meta device gets memory first. The experts' operations initialise themselves.
        """
        router = to_real(self, "router")
        torch.nn.init.normal_(router, std=self.hidden_size**-0.5)
        for name in ("expert_bias", "tokens_per_expert"):
            buffer = self._buffers[name]
            if buffer is not None and buffer.is_meta:
                setattr(self, name, torch.zeros_like(buffer, device=router.device))
            elif buffer is not None:
                buffer.zero_()

    @in_shared_region
    def forward(
        self, inp: torch.Tensor, *, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the block.

        Parameters
        ----------
        inp : torch.Tensor
            ``(..., hidden_size)``.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.

        Returns
        -------
        torch.Tensor or tuple
            ``(..., hidden_size)``; with `aux_loss_coeff`, the loss behind it.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If the input does not fit.
        """
        if not isinstance(inp, torch.Tensor) or inp.dtype not in NATIVE_TYPES:
            got = inp.dtype if isinstance(inp, torch.Tensor) else type(inp).__name__
            message = f"MoE: the input must be a tensor of float32, float16 or bfloat16, got {got}"
            raise DtypeError(message)
        if inp.dim() == 0 or inp.shape[-1] != self.hidden_size:
            message = (
                f"MoE: the input's last dimension must be hidden_size = {self.hidden_size}, got a tensor of shape "
                f"{list(inp.shape)}"
            )
            raise ShapeError(message)
        outside: Any = _AS_IT_IS
        if is_any_autocast_enabled():
            outside = torch.autocast(inp.device.type, enabled=False)
        # Attributes of modules that lie in this dictionary cost several microseconds.
        experts: Any = self._modules["experts"]
        program = self._program(experts, inp)
        one = None if program is not None else exported.run(self, inp)
        if program is not None:
            merged, logits = self._in_one(program, inp, is_first_microbatch)
        elif one is not None:
            merged, logits, counts = one
            if counts is not None and self._counts():
                self.tokens_per_expert.add_(counts)  # type: ignore[union-attr]
        else:
            with outside:
                probs, chosen, logits = self._route(inp)
            merged = self._mixture(experts, inp, chosen, probs, self.topk, is_first_microbatch)
            # A call that fails counts nothing.
            if self.tokens_per_expert is not None and self._counts():
                self.tokens_per_expert.add_(chosen.sum(0))
        if self.aux_loss_coeff == 0.0:
            return merged
        with outside:
            return merged, self._aux_loss(logits)

    @property
    def _how(self) -> _How:
        return (
            self.topk,
            self.use_pre_softmax,
            self.num_groups,
            self.group_topk,
            self.scaling_factor,
            self.score_function,
        )

    def _program(self, experts: Any, inp: torch.Tensor) -> ExpertsProgram | None:
        """Return the program of the whole block; None if it does not take the call."""
        parameters = self._parameters
        weight = parameters.get("router")  # a parametrization takes it away
        if (
            self._ranks is not None
            or weight is None
            or weight.dtype not in _ROUTER_TYPES
            or not is_unseen(inp, weight)
        ):
            return None
        router = self._router_now()
        return self._mixture.routed_program(experts, inp, self.topk, router, parameters)

    def _router_now(self) -> Router:
        """Return how the router chooses, as the attributes say now."""
        how, bias = self._how, self._buffers["expert_bias"]
        asked = how, bias is not None, self.aux_loss_coeff != 0.0
        if self._router is None or self._router[0] != asked:
            choice = choice_of(self.num_experts, *how, bias)
            self._router = asked, Router(choice, *asked[1:])
        return self._router[1]

    def _exported_program(
        self, dtype: torch.dtype, autocast: torch.dtype | None, device: torch.device
    ) -> ExpertsProgram | None:
        """Return the program that :meth:`_program` would return for an eager call."""
        experts: Any = self._modules["experts"]
        weight, parameters = self._parameters.get("router"), self._parameters
        if (
            self._ranks is not None
            or weight is None
            or is_traceable_wrapper_subclass(weight)  # plain ones are fake here
            or weight.dtype not in _ROUTER_TYPES
            or weight.device != device
            or not may_replace(experts)
        ):
            return None
        router: Any = self._router_now()
        program = self._mixture.routed_program_of(experts, self.topk, router, parameters)
        return program if program is not None and program.computes_in(dtype, autocast) else None

    def _prepare_exported(self, *call: Any) -> Any:
        return exported.prepare(self, *call)

    # A trace calls this method, on the real block, and its result is a constant.
    _prepare_exported._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _in_one(
        self, program: ExpertsProgram, inp: torch.Tensor, is_first_microbatch: bool | None
    ) -> Any:
        """Return the result of the block's program and the logits; None for logits that nobody needs."""
        bias: Any = self._buffers["expert_bias"]
        if bias is None:
            made = program(inp, (), is_first_microbatch)
        else:
            total: Any = self._buffers["tokens_per_expert"]
            counts = torch.empty_like(total)
            made = program(inp, (bias, counts), is_first_microbatch)
            if self._counts():
                total.add_(counts)
        return made if type(made) is tuple else (made, None)

    def _counts(self) -> bool:
        """Tell whether the experts' tokens are counted: once, though a checkpoint repeats calls in backward."""
        return self.training and (is_compiling() or torch._C._current_graph_task_id() == -1)

    def _route(self, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return probabilities, the map of the chosen experts, and logits, each ``(tokens, experts)``."""
        if torch._C._are_functorch_transforms_active():
            message = "MoE: torch.func transforms (vmap, grad, ...) do not work here; use torch.nn layers in them"
            raise refusal(message)
        tokens = inp.reshape(-1, self.hidden_size)
        logits = functional.linear(tokens.float(), self.router.float())
        return *fused_topk_with_score_function(logits, *self._how, self.expert_bias), logits

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Drop the programs, since ``.to()`` and its kin replace the parameters; keep the experts' bias in float32."""
        self._mixture.forget()
        former = self.expert_bias
        result = super()._apply(fn, recurse)
        bias = self.expert_bias
        # Steps of the bias are lost in 16 bits.
        if former is not None and bias is not None and bias.dtype is not torch.float32:
            self.expert_bias = former.to(bias.device)
        return result

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load; give counts on the meta device memory beside a bias that has it, since no checkpoint has counts."""
        super()._load_from_state_dict(*arguments)
        bias, counts = self.expert_bias, self.tokens_per_expert
        if bias is None or counts is None or bias.is_meta:
            return
        if bias.dtype is not torch.float32:
            self.expert_bias = bias.float()
        if counts.is_meta:
            self.tokens_per_expert = torch.zeros_like(bias, dtype=counts.dtype)

    def explain(self) -> str:
        """Describe the launches of the block's program, for each kind of call that has run.

        Returns
        -------
        str
            Lines of text.
        """
        return self._mixture.explain(self.experts)

    def _aux_loss(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.numel() == 0:
            return logits.sum()
        if self.num_experts <= MOST_EXPERTS and is_unseen(logits):
            return balancing_loss(logits, self.topk, self.score_function, self.aux_loss_coeff)
        chosen, scores = fused_compute_score_for_moe_aux_loss(
            logits, self.topk, self.score_function
        )
        sizes = logits.shape[0], self.num_experts, self.topk
        counts = chosen.sum(0, dtype=torch.float32)
        return fused_moe_aux_loss(scores, counts, *sizes, self.aux_loss_coeff)

    def update_expert_bias(self, rate: float = 1e-3) -> None:
        """Move the bias of each expert towards an even share of all ranks' tokens since the last update.

        Parameters
        ----------
        rate : float
            Step of an expert that has had more, or fewer, tokens than the mean.
        """
        if self.expert_bias is None or self.tokens_per_expert is None:
            message = "MoE: update_expert_bias() needs expert_bias=True"
            raise ArgumentError(message)
        counts = self.tokens_per_expert
        if self._ranks is not None:
            counts = self._ranks.sum(counts)
        counts = counts.float()
        self.expert_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
        self.tokens_per_expert.zero_()

    def _names_of_all_ranks(self) -> dict[str, str]:
        """Return the names of the experts' parameters in a checkpoint of all ranks."""
        if self._ranks is None:
            return {}
        first, names = self._ranks.rank * self._ranks.num_local, {}
        for name, _ in self.experts.named_parameters(prefix="experts"):
            kind = name.rstrip("0123456789")
            if kind != name:
                names[name] = f"{kind}{first + int(name[len(kind) :])}"
        return names

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return the stacks of experts that ranks have parts of."""
        if self._ranks is None:
            return {}
        parameters = self.experts.named_parameters(prefix="experts")
        return {name: Share(0, self.ep_group) for name, _ in parameters if not name[-1].isdigit()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let the same ranks share deep copies."""
        return reduced_sharing(super().__reduce_ex__(protocol), [self.ep_group])

    def backward_dw(self) -> None:
        """Compute the experts' weight gradients that `delay_wgrad_compute` has left, the last product's first."""
        products: Any = self.experts[2], self.experts[0]
        for op in products:
            op.backward_dw()

    def extra_repr(self) -> str:
        """Return sizes and routing."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, num_experts={self.num_experts}, "
            f"topk={self.topk}, activation={self.activation!r}, score_function={self.score_function!r}"
        )
