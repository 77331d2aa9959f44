"""Runs tokens through the experts that they are routed to, and sums the experts' results."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.experts.exchange import ExpertRanks
from te_fast.experts.program import ExpertsProgram, Router, is_one_program, takes
from te_fast.moe.permutation import moe_permute_with_probs, moe_unpermute
from te_fast.ops.sequential import Sequential
from te_fast.runtime.compiling import is_unseen


class Mixture:
    """Permutation, experts and sum: one program, maybe with a router, or the operations one by one if they have hooks.

    Parameters
    ----------
    name : str
        Name in messages.
    ranks : ExpertRanks, optional
        Ranks that share the experts.
    """

    def __init__(self, name: str, ranks: ExpertRanks | None = None) -> None:
        self._name, self._ranks = name, ranks
        #: Made at first use, and again for other operations; the second one has a router.
        self.program: ExpertsProgram | None = None
        self.routed: ExpertsProgram | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the programs, which each copy makes for itself."""
        return self.__dict__ | {"program": None, "routed": None}

    def __call__(
        self,
        experts: Sequential,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        probs: torch.Tensor,
        topk: int,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Return the sums of the experts' results, in the shape of the tokens.

        Parameters
        ----------
        experts : Sequential
            The two products and the activation between them.
        tokens : torch.Tensor
            ``(..., hidden_size)``.
        chosen, probs : torch.Tensor
            ``(tokens, num_experts)``: the mask of the experts of each token, and their factors.
        topk : int
            Experts of a token.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.
        """
        if self._ranks is None and is_unseen(tokens) and takes(experts, tokens):
            program = self.program_of(experts, topk)
            if program is not None:
                merged: torch.Tensor = program(tokens, (chosen, probs), is_first_microbatch)
                return merged
        return self.one_by_one(experts, tokens, chosen, probs, topk, is_first_microbatch)

    def routed_program(
        self,
        experts: Sequential,
        tokens: torch.Tensor,
        topk: int,
        router: Router,
        parameters: dict[str, Any],
    ) -> ExpertsProgram | None:
        """Return the program that also routes the tokens; None if it cannot replace the calls of the operations.

        Parameters
        ----------
        experts : Sequential
            The two products and the activation between them.
        tokens : torch.Tensor
            ``(..., hidden_size)``, without hooks or tracing.
        topk : int
            Experts of a token.
        router : Router
            How the router chooses.
        parameters : dict
            The dictionary that has the router's weight as ``"router"``.
        """
        if not takes(experts, tokens):
            return None
        program = self.routed_program_of(experts, topk, router, parameters)
        return program if program is not None and program.keeps_type(tokens) else None

    def routed_program_of(
        self, experts: Sequential, topk: int, router: Router, parameters: dict[str, Any]
    ) -> ExpertsProgram | None:
        """Return the program that also routes the tokens; None if the operations cannot be one program."""
        if self.routed is None or not self.routed.is_of(experts, topk, router):
            if not is_one_program(experts):
                return None
            self.routed = ExpertsProgram(experts, topk, self._name, router, parameters)
        return self.routed

    def program_of(self, experts: Sequential, topk: int) -> ExpertsProgram | None:
        """Return the program of the operations with permutation and sum; None if they cannot be one program."""
        if self.program is None or not self.program.is_of(experts, topk):
            if not is_one_program(experts):
                return None
            self.program = ExpertsProgram(experts, topk, self._name)
        return self.program

    def one_by_one(
        self,
        experts: Sequential,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        probs: torch.Tensor,
        topk: int,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Return the same by calls of the operations."""
        shape = tokens.shape
        tokens = tokens.reshape(-1, shape[-1])
        splits = chosen.sum(0)
        permuted, factors, row_map = moe_permute_with_probs(
            tokens, probs, chosen, tokens.shape[0] * topk
        )

        def products(
            rows: torch.Tensor, splits: torch.Tensor, factors: torch.Tensor
        ) -> torch.Tensor:
            first = is_first_microbatch
            y: torch.Tensor = experts(rows, splits, factors, splits, is_first_microbatch=first)
            return y

        if self._ranks is None:
            out = products(permuted, splits, factors)
        else:
            out = self._ranks.apply(products, permuted, splits, factors)
        return moe_unpermute(out, row_map, restore_shape=tokens.shape).view(shape)

    def forget(self) -> None:
        """Drop the programs, since parameters are being replaced."""
        self.program = self.routed = None

    def explain(self, experts: Sequential) -> str:
        """Describe the launches of calls."""
        programs = [program for program in (self.routed, self.program) if program is not None]
        return "\n".join([program.explain() for program in programs]) or experts.explain()
