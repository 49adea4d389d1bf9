from collections import Counter
from typing import Any


class Requests:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store, self.counted = store, Counter[str]()

    def has_extended_api(self) -> bool:
        return bool(self.store.has_extended_api())  # nobody is asked

    def __getattr__(self, request: str) -> Any:
        def ask(*args: Any) -> Any:
            self.counted[request] += 1
            return getattr(self.store, request)(*args)

        return ask
