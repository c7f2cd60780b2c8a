"""Requests for vLLM's engine core by copying one that vLLM has made, once that is known to give the same.

vLLM's input processor checks and clones what never differs between our requests, at 0.1 ms each: new weights add everything
that runs again, some hundred at once. The second request is made both ways and compared; if they differ every request goes
through vLLM for good. Imports no vllm.
"""

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
Make = Callable[[int, list[int], int, str], Any]
"""vLLM's own way: (key, tokens, max_tokens, salt) to a request."""


class Pattern:
    """Makes requests that differ in key, tokens, most new tokens and salt alone."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._first: Any = None
        self._copies: bool | None = None  # whether copies are as good; None: not tried yet

    def request(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> Any:
        """A request that continues `tokens`."""
        if self._copies and self._first is not None:
            return self._copy(key, tokens, max_tokens, salt)
        made = self._make(key, tokens, max_tokens, salt)
        if self._copies is None:
            self._learn(made, key, tokens, max_tokens, salt)
        return made

    def _learn(self, made: Any, key: int, tokens: list[int], max_tokens: int, salt: str) -> None:
        try:
            if self._first is None:
                self._first = copy.copy(made)
                self._first.sampling_params = copy.copy(made.sampling_params)
                return
            other = self._copy(key, tokens, max_tokens, salt)
            other.arrival_time = made.arrival_time
            self._copies = bool(other == made)
        except Exception as e:  # noqa: BLE001 - whatever a release says to it: then not
            logger.warning("requests cannot be copied: %s", e)
            self._copies = False

    def _copy(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> Any:
        request = copy.copy(self._first)
        request.request_id, request.prompt_token_ids, request.cache_salt = str(key), tokens, salt
        request.arrival_time = time.time()
        params = request.sampling_params = copy.copy(request.sampling_params)
        params.max_tokens = max_tokens
        return request
