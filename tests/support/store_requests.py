from collections import Counter
from typing import Any


class CountingStore:
    """A store that counts its requests by method."""

    def __init__(self, store: Any) -> None:
        self.store, self.counted = store, Counter[str]()

    def has_extended_api(self) -> bool:
        return bool(self.store.has_extended_api())  # not a request to the server

    def __getattr__(self, request: str) -> Any:
        def send(*args: Any) -> Any:
            self.counted[request] += 1
            return getattr(self.store, request)(*args)

        return send
