"""Adam on torch's fused kernel, with Transformer Engine's options for the states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from te_fast.errors import (
    ArgumentError,
    ArgumentKeyError,
    ListsError,
    StateDtypeError,
    StateError,
    UnsupportedError,
)
from te_fast.optimizers import stored
from te_fast.optimizers.layouts import laid_out_as, without_gaps
from te_fast.optimizers.options import check_betas, check_not_negative
from te_fast.optimizers.zeroing import forgets, warn_of_set_grad_none
from te_fast.tensor.dtensors import local_part as _local
from te_fast.tensor.dtensors import sharded_like, shared_as
from te_fast.tensor.primary import is_quantized, note_master
from te_fast.tensor.quantizer import check_whole

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master_param"
_WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
#: Attributes beside those that torch's optimizers copy and pickle.
_OWN = (
    "capturable",
    "master_weights",
    "master_weight_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "use_decoupled_grad",
    "adam_w_mode",
    "name_to_dtype_map",
    "store_param_remainders",
    "set_grad_none",
    "_scales",
)
#: After so many steps both powers of the betas are zero, so that the bias correction is 1.
NO_CORRECTION = 1e12


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW, in one launch for all parameters of a group.

    The kernel, ``torch._fused_adamw_``, computes in FP32, for states of all types.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them.
    lr : float, default = 1e-3
        Learning rate. With `capturable` groups keep it as a tensor.
    betas : tuple of float, default = (0.9, 0.999)
        Coefficients of the running averages of the gradient and its square.
    eps : float, default = 1e-8
        Added to the denominator.
    weight_decay : float, default = 0.0
        Weight decay.
    amsgrad : bool, default = False
        Not supported, as in Transformer Engine.
    bias_correction : bool, default = True
        Correct the averages of the first steps.
    adam_w_mode : bool, default = True
        Decay weights separately from the gradient, as AdamW does.
    capturable : bool, default = False
        Keep learning rate and step on the device, so that a captured graph can repeat the step.
    master_weights : bool, default = False
        Also keep the parameters in higher precision, as ``master_param``; quantised parameters need that.
    master_weight_dtype : torch.dtype, default = torch.float32
        Type of the master weights, float32 or float16 with a scale.
    exp_avg_dtype, exp_avg_sq_dtype : torch.dtype, default = torch.float32
        Types of the moments: float32, bfloat16, float16 with a scale, or uint8, which is FP8 with a scale.
    use_decoupled_grad : bool, default = False
        Read gradients from ``parameter.decoupled_grad``.
    store_param_remainders : bool, default = False
        For BF16 parameters, keep only the 16 bits of the FP32 master weights that the parameters lack. The parameters
        are then rounded half away from zero.
    set_grad_none : bool, optional
        Deprecated: give `set_to_none` to :meth:`zero_grad`.

    Raises
    ------
    UnsupportedError
        For `amsgrad`, for types that states cannot have, and for combinations that `capturable` excludes.
    ArgumentError
        If `lr`, `eps` or `weight_decay` is negative, or `betas` are not two numbers from 0 to below 1.

    See Also
    --------
    FusedSGD : Stochastic gradient descent.
    te_fast.pytorch.quantized_model_init : Makes the quantised parameters that need `master_weights`.

    Notes
    -----
    ``group["step"]`` counts the steps of a group. ``state_dict()`` holds FP32 states, for states of all types.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import FusedAdam
    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    >>> optimizer = FusedAdam([weight], lr=0.5, master_weights=True)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> optimizer.state[weight]["master_param"]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            _MASTER: master_weight_dtype,
        }
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.set_grad_none = set_grad_none
        self._check_options(amsgrad)
        check_not_negative("FusedAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("FusedAdam", betas)
        warn_of_set_grad_none("FusedAdam", set_grad_none)
        defaults = {
            "lr": torch.as_tensor(lr, dtype=torch.float32).detach().clone() if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        if capturable:
            self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of torch's optimizer, and what it does not know, for copies and pickles."""
        own = {name: getattr(self, name) for name in _OWN}
        if self.capturable:
            own["_step_supports_amp_scaling"] = True
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. With `capturable` its learning rate becomes a tensor on their device."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            if group["lr"] is self.defaults["lr"]:  # else groups would share it
                group["lr"] = group["lr"].clone()
            self._rate_of(group)

    def _rate_of(self, group: dict[str, Any]) -> Any:
        """Return a group's learning rate. With `capturable` it is a tensor, which graphs read.

        Schedulers may have assigned a number, and so does a state that was saved without `capturable`.
        """
        rate, device = group["lr"], group["params"][0].device
        if not self.capturable:
            return rate
        if not (
            isinstance(rate, torch.Tensor) and rate.device == device and rate.dtype is torch.float32
        ):
            rate = group["lr"] = torch.as_tensor(rate, dtype=torch.float32).to(device)
        return rate.reshape(())

    def _check_options(self, amsgrad: bool) -> None:
        def refuse(condition: bool, message: str) -> None:
            if condition:
                raise UnsupportedError(f"FusedAdam: {message}")  # noqa: EM102

        refuse(amsgrad, "amsgrad=True is not supported; use torch.optim.AdamW")
        refuse(
            self.master_weights and self.master_weight_dtype not in stored.MASTER_DTYPES,
            f"master_weight_dtype must be torch.float32 or float16, got {self.master_weight_dtype}",
        )
        moments = [self.name_to_dtype_map[name] for name in _MOMENTS]
        for name, dtype in zip(_MOMENTS, moments, strict=True):
            refuse(
                dtype not in stored.MOMENT_DTYPES,
                f"{name}_dtype must be torch.float32, float16, bfloat16 or uint8 (FP8), got {dtype}",
            )
        if not self.capturable:
            return
        refuse(
            self.master_weights and self.master_weight_dtype is not torch.float32,
            "capturable=True needs master_weight_dtype=torch.float32",
        )
        refuse(
            moments not in ([torch.float32] * 2, [torch.bfloat16] * 2),
            "capturable=True needs exp_avg_dtype and exp_avg_sq_dtype both float32 or both bfloat16, got "
            f"{moments}",
        )
        refuse(
            self.store_param_remainders,
            "capturable=True and store_param_remainders=True exclude each other",
        )

    # Gradients -----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros.

        Parameters
        ----------
        set_to_none : bool, optional
            Whether to drop them; True by default.

        Raises
        ------
        ArgumentError
            If the constructor was given another `set_grad_none`.
        """
        forget = forgets("FusedAdam", set_to_none, self.set_grad_none)
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=forget)
            return
        for parameter in self._parameters():
            grad = getattr(parameter, "decoupled_grad", None)
            if forget:
                parameter.decoupled_grad = None
            elif grad is not None:
                grad.zero_()

    def _parameters(self) -> Iterable[Any]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _gradient(self, parameter: Any) -> torch.Tensor | None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        grad: torch.Tensor | None = getattr(parameter, name, None)
        if grad is not None and grad.is_sparse:
            message = f"FusedAdam: sparse gradients are not supported, got {grad.layout}"
            raise UnsupportedError(message)
        return grad

    # States --------------------------------------------------------------------------------------

    def _keeps_remainder(self, parameter: torch.Tensor, state_name: str) -> bool:
        is_bf16 = parameter.dtype is torch.bfloat16 and not is_quantized(_local(parameter))
        return self.store_param_remainders and state_name == _MASTER and is_bf16

    def _scale(self, parameter: torch.Tensor, state_name: str) -> torch.Tensor | None:
        return self._scales.get(parameter, {}).get(state_name)

    def _initialize_state(self, parameter: torch.Tensor, state_name: str) -> None:
        local = _local(parameter)
        # For a quantised tensor only shape and device are used.
        like = torch.empty(local.shape, device=local.device) if is_quantized(local) else local
        if self._keeps_remainder(parameter, state_name):
            made, scale = torch.zeros_like(like, dtype=torch.int16), None
        else:
            made, scale = stored.make(like, self.name_to_dtype_map[state_name])
        self.state[parameter][state_name] = sharded_like(parameter, made)
        if scale is not None:
            self._scales.setdefault(parameter, {})[state_name] = scale

    @torch.no_grad()
    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Make the states of a parameter: moments of zero, and the master weight.

        Parameters
        ----------
        param : torch.nn.Parameter
            A parameter of the optimizer.
        store_param_remainders : bool, optional
            Whether its master weight is kept as remainders; by default the optimizer's option.
        """
        expected = self._keeps_remainder(param, _MASTER)
        if store_param_remainders not in (None, expected):
            message = (
                f"FusedAdam.initialize_state: store_param_remainders={store_param_remainders}, but the optimizer was "
                f"made for {expected} with parameters of {param.dtype}"
            )
            raise ArgumentError(message)
        for name in _MOMENTS:
            self._initialize_state(param, name)
        if not self.master_weights:
            return
        self._initialize_state(param, _MASTER)
        if not expected:  # the remainders of a BF16 number are zero
            self.set_scaled_state(param, _MASTER, _local(param).detach().float())

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """Return a state in FP32, or the remainders of a master weight.

        Parameters
        ----------
        param : torch.nn.Parameter
            A parameter of the optimizer.
        state_name : str
            ``'exp_avg'``, ``'exp_avg_sq'`` or ``'master_param'``.
        skip_unscale : bool, default = False
            Return a BF16 state as it is.

        Returns
        -------
        torch.Tensor
            This rank's part. A state in FP32 is returned itself, not a copy.

        Raises
        ------
        ArgumentKeyError
            If the parameter has no such state (yet).
        """
        states = self.state.get(param, {})
        if state_name not in states:
            message = (
                f"FusedAdam: a parameter of shape {list(param.shape)} has no state {state_name!r}, only "
                f"{list(states)}; initialize_state() makes all states, and set_scaled_state() one"
            )
            raise ArgumentKeyError(message)
        kept = _local(states[state_name])
        is_bf16 = self.name_to_dtype_map[state_name] is torch.bfloat16
        if self._keeps_remainder(param, state_name) or (skip_unscale and is_bf16):
            return kept
        return stored.read(kept, self._scale(param, state_name))

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Keep a state.

        Parameters
        ----------
        param : torch.nn.Parameter
            A parameter of the optimizer.
        state_name : str
            ``'exp_avg'``, ``'exp_avg_sq'`` or ``'master_param'``.
        unscaled_state : torch.Tensor
            This rank's part in FP32; int16 remainders where the master weight is kept so.

        Raises
        ------
        StateDtypeError
            If it has another type.
        StateError
            If it has another shape, or the optimizer has no state of that name.
        """
        self._check_state("set_scaled_state", param, state_name, unscaled_state)
        remainder = self._keeps_remainder(param, state_name)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name)
        kept = _local(self.state[param][state_name])
        if remainder:
            kept.copy_(unscaled_state)
        else:
            stored.write(kept, self._scale(param, state_name), unscaled_state.to(kept.device))

    def _check_state(self, function: str, parameter: torch.Tensor, name: str, value: Any) -> None:
        """Raise unless a value can be kept as a parameter's state."""
        if name not in self.name_to_dtype_map:
            known = ", ".join(map(repr, self.name_to_dtype_map))
            message = f"FusedAdam.{function}: there is no state {name!r}; there are {known}"
            raise StateError(message)
        got = getattr(value, "dtype", type(value).__name__)
        expected = torch.int16 if self._keeps_remainder(parameter, name) else torch.float32
        if got is not expected:
            message = (
                f"FusedAdam.{function}: {name} must be {expected}, got {got}; store_param_remainders of the optimizer "
                "and of the checkpoint must be the same"
            )
            raise StateDtypeError(message)
        shape = _local(parameter).shape
        if value.shape != shape:
            message = (
                f"FusedAdam.{function}: {name} of a parameter of shape {list(shape)} must have that shape, got "
                f"{list(value.shape)}; a state of other ranks' shares must be gathered and shared out again"
            )
            raise StateError(message)

    # Checkpoints ---------------------------------------------------------------------------------

    def _by_number(self, state_dict: dict[str, Any]) -> dict[Any, Any]:
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return dict(zip(numbers, self._parameters(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with moments and master weights in FP32."""
        state_dict = super().state_dict()
        for number, parameter in self._by_number(state_dict).items():
            if number in state_dict["state"]:
                state_dict["state"][number] = {
                    name: sharded_like(parameter, self.get_unscaled_state(parameter, name))
                    for name in state_dict["state"][number]
                }
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, or of Transformer Engine.

        Raises
        ------
        StateDtypeError
            If only one of the optimizer and the state keeps master weights as remainders.
        StateError
            If a moment or a master weight is missing, or has another shape.
        ArgumentError
            If the state has other groups of parameters. In all cases the optimizer keeps its own state.
        """
        found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

        def take(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            found.extend(self._checked(given))
            return {"state": {}, "param_groups": deepcopy(given["param_groups"])}

        # torch would give the states the parameters' type. It loads only the groups, after the hooks of users that
        # change the state, and before those that see the result.
        taking = self.register_load_state_dict_pre_hook(take)
        keeping = self.register_load_state_dict_post_hook(
            lambda _: self._keep_loaded(found), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            taking.remove()
            keeping.remove()

    def _keep_loaded(self, found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
        """Keep the states of each parameter in place of all others."""
        self.state.clear()
        self._scales.clear()
        for parameter, values in found:
            for name, value in values.items():
                self.set_scaled_state(parameter, name, value)
            if _MASTER in values and self.master_weight_dtype is torch.float32:
                note_master(parameter, _local(self.state[parameter][_MASTER]))

    def _checked(
        self, state_dict: dict[str, Any]
    ) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return the states of each parameter, in FP32 or as remainders, after a check of all."""
        own, given = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if own != given:
            message = (
                f"FusedAdam.load_state_dict: the optimizer has groups of {own} parameters, and the state of {given}; "
                "make the optimizer with the groups of the saved one"
            )
            raise ArgumentError(message)
        found = []
        needed = (*_MOMENTS, _MASTER) if self.master_weights else _MOMENTS
        for number, parameter in self._by_number(state_dict).items():
            values: dict[str, torch.Tensor] = {}
            for name, value in state_dict["state"].get(number, {}).items():
                if value is not None:
                    local = _local(value)
                    is_number = isinstance(local, torch.Tensor) and local.dtype is not torch.int16
                    values[name] = local.float() if is_number else local
            missing = [name for name in needed if name not in values]
            if values and missing:
                message = (
                    f"FusedAdam.load_state_dict: the state of parameter {number} lacks {', '.join(missing)}; "
                    "master_weights of the optimizer and of the checkpoint must be the same"
                )
                raise StateError(message)
            for name, value in values.items():
                self._check_state("load_state_dict", parameter, name, value)
            found.append((parameter, values))
        return found

    # The step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Update the parameters.

        Parameters
        ----------
        closure : Callable, optional
            Computes the loss and the gradients again.
        grad_scaler : torch.amp.GradScaler, optional
            With `capturable`: unscales the gradients, and the step is skipped if one of them is not finite.

        Returns
        -------
        object
            The closure's result.

        Raises
        ------
        StateError
            For quantised parameters without master weights.
        QuantizedTensorError
            For a parameter that is a part of a quantised tensor with one scale.
        ListsError
            For a gradient that has not as many elements as its parameter.
        UnsupportedError
            For sparse gradients, parameters of other types, and quantised parameters with `capturable`. In all cases
            no parameter and no state has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Whatever a group lacks is refused before any group is written or counted.
        given = [self._checked_gradients(group) for group in self.param_groups]
        scales = [self._scaler_state(group, grad_scaler) for group in self.param_groups]
        for group, pairs, (found_inf, grad_scale) in zip(
            self.param_groups, given, scales, strict=True
        ):
            self._count(group, found_inf)
            updates = [_Update(self, parameter, grad) for parameter, grad in pairs]
            if updates:
                self._apply(group, updates, found_inf, grad_scale)
        return loss

    def _checked_gradients(self, group: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
        """Return a group's parameters that have gradients, with these, after a check of all."""
        pairs = []
        for parameter in group["params"]:
            grad = self._gradient(parameter)
            if grad is not None and grad.numel() > 0:
                self._check_parameter(_local(parameter))
                grad = shared_as(grad, parameter)
                _check_size(_local(parameter), _local(grad))
                pairs.append((parameter, grad))
        return pairs

    def _check_parameter(self, local: Any) -> None:
        """Refuse a parameter that the step cannot write."""
        quantized = is_quantized(local)
        if quantized and not self.master_weights:
            message = (
                f"FusedAdam: a parameter is a {type(local).__name__}, which needs master weights; make the "
                "optimizer with master_weights=True"
            )
            raise StateError(message)
        if quantized and self.capturable:
            message = "FusedAdam: quantised parameters are not supported with capturable=True"
            raise UnsupportedError(message)
        if quantized:
            check_whole(local)
        if local.dtype not in _WEIGHTS:
            message = (
                f"FusedAdam: parameters must be FP32, FP16, BF16 or quantised, got {local.dtype}"
            )
            raise UnsupportedError(message)

    def _scaler_state(
        self, group: dict[str, Any], grad_scaler: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return whether a gradient is not finite, and the scale of the gradients unless the scaler has removed it."""
        if grad_scaler is None or not grad_scaler.is_enabled() or not group["params"]:
            return None, None
        if not self.capturable:
            message = (
                "FusedAdam.step: grad_scaler needs capturable=True; else call grad_scaler.step()"
            )
            raise UnsupportedError(message)
        device = group["params"][0].device
        found = grad_scaler._check_inf_per_device(self)[device]
        states = getattr(grad_scaler, "_per_optimizer_states", {})
        if id(self) in states and states[id(self)]["stage"] is OptState.UNSCALED:
            return found, None
        return found, grad_scaler._get_scale_async().to(device)

    def _count(self, group: dict[str, Any], found_inf: torch.Tensor | None) -> None:
        """Count a step of a group, one without parameters, too: other ranks may have some."""
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
            return
        if not isinstance(group.get("step"), torch.Tensor):
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            count = group.get("step", 0)
            group["step"] = torch.full((1,), count, dtype=torch.int, device=device)
        taken = 1 if found_inf is None else (found_inf != 1).to(torch.int)
        group["step"] += taken

    def _apply(
        self,
        group: dict[str, Any],
        updates: list[_Update],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        main = updates[0].main
        if not group["bias_correction"]:
            step = main.new_full((), NO_CORRECTION)
        elif self.capturable:
            step = group["step"].reshape(()).float()
        else:
            step = main.new_full((), float(group["step"]))
        function = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        beta1, beta2 = group["betas"]
        function(
            [update.main for update in updates],
            [update.grad for update in updates],
            [update.exp_avg for update in updates],
            [update.exp_avg_sq for update in updates],
            [],
            [step] * len(updates),
            lr=self._rate_of(group),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        for update in updates:
            update.keep()
        if grad_scale is not None:
            # The kernel has divided the gradients by the scale. Gradients that were copied for it get the quotients,
            # too.
            copied = [update for update in updates if update.grad is not update.given_grad]
            if copied:
                torch._foreach_copy_(
                    [update.given_grad for update in copied],
                    [update.grad.reshape(update.given_grad.shape) for update in copied],
                )
        # One launch for all tensors of a type, if torch has such a function.
        targets = [update.local for update in updates if update.is_rounded]
        if targets:
            torch._foreach_copy_(targets, [u.main for u in updates if u.is_rounded])


class _Update:
    """The FP32 tensors that the kernel reads and writes for one parameter, and the stored states."""

    def __init__(self, optimizer: FusedAdam, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter
        if not optimizer.state[parameter]:
            optimizer.initialize_state(parameter)
        self.local: Any = _local(parameter).detach()
        self.given_grad = _local(grad)
        self._quantized = is_quantized(self.local)
        self._remainder = optimizer._keeps_remainder(parameter, _MASTER)
        if self._remainder:
            kept = optimizer.get_unscaled_state(parameter, _MASTER)
            self.main = stored.join(self.local, kept)
        elif optimizer.master_weights:
            self.main = optimizer.get_unscaled_state(parameter, _MASTER)
        else:
            self.main = self.local.float()
        self.main = without_gaps(self.main)
        self.grad = laid_out_as(self.given_grad.float(), self.main)
        self.exp_avg, self.exp_avg_sq = (
            laid_out_as(optimizer.get_unscaled_state(parameter, name), self.main)
            for name in _MOMENTS
        )
        #: Whether the parameter must be rounded from the new master weight.
        self.is_rounded = (
            self.main is not self.local and not self._quantized and not self._remainder
        )

    def keep(self) -> None:
        """Store the kernel's results, except a rounded parameter."""
        optimizer, parameter = self._optimizer, self._parameter
        state = optimizer.state[parameter]
        for name, values in zip(_MOMENTS, (self.exp_avg, self.exp_avg_sq), strict=True):
            stored.write(_local(state[name]), optimizer._scale(parameter, name), values)
        if self._remainder:
            stored.split(self.main, self.local, _local(state[_MASTER]))
            return
        if optimizer.master_weights:
            stored.write(_local(state[_MASTER]), optimizer._scale(parameter, _MASTER), self.main)
        if self._quantized:
            self.local.quantize_(self.main)


def _check_size(local: torch.Tensor, grad: torch.Tensor) -> None:
    """Refuse a gradient of another size: the kernel would read beyond its memory."""
    if grad.numel() != local.numel():
        message = (
            f"FusedAdam: a parameter of shape {list(local.shape)} must have a gradient of as many elements, got shape "
            f"{list(grad.shape)}"
        )
        raise ListsError(message)
