"""The delayed weight gradients of a layer, as Transformer Engine shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fast.errors import StateError

if TYPE_CHECKING:
    from te_fast.layers.base import TransformerEngineBaseModule


class WeightGradStore:
    """Whether a layer leaves its weights' gradients to ``backward_dw()``, and whether any wait.

    The gradients themselves are with the layer's native weights.

    Parameters
    ----------
    layer : torch.nn.Module
        The layer.
    """

    def __init__(self, layer: TransformerEngineBaseModule) -> None:
        self._layer = layer

    def delay_wgrad_compute(self) -> bool:
        """Tell whether backward leaves the weights' gradients to ``backward_dw()``."""
        return self._layer.delay_wgrad_compute

    def enable_delay_wgrad_compute(self) -> None:
        """Leave the weights' gradients to ``backward_dw()`` from now on; raises as :meth:`assert_empty`."""
        self._set(delays=True)

    def disable_delay_wgrad_compute(self) -> None:
        """Compute the weights' gradients in backward from now on; raises as :meth:`assert_empty`."""
        self._set(delays=False)

    def _set(self, *, delays: bool) -> None:
        if self._layer.delay_wgrad_compute != delays:  # a change makes the layer's native half anew
            self.assert_empty()
            self._layer.delay_wgrad_compute = delays

    def assert_empty(self) -> None:
        """Check that no gradient waits.

        Raises
        ------
        StateError
            If backwards have left gradients that no ``backward_dw()`` has computed.
        """
        waiting = max(
            (handle.deferred_count() for handle in self._layer._weight_handles().values()),
            default=0,
        )
        if waiting:
            message = (
                f"{self._layer.name}: the weights' gradients of {waiting} backwards wait; call backward_dw() once for "
                "each"
            )
            raise StateError(message)
