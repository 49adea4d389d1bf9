"""A store that counts the requests of ranks."""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):  # type: ignore[name-defined, misc]  # torch does not export it
    """Counts requests and bytes, also those of a PrefixStore or process group on top of it."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner: Any = inner or dist.HashStore()  # type: ignore[attr-defined]  # torch does not export it
        self.requests: Counter[str] = Counter()
        self.num_bytes = 0

    def count(self, request: str, *content: Any) -> None:
        self.requests[request] += 1
        self.num_bytes += sum(len(each) for each in content)

    def set(self, key: str, value: Any) -> None:
        self.count("set", key, value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        self.count("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self.count("add", key)
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        self.count("check", *keys)
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.count("wait", *keys)
        self.inner.wait(keys, *timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.count("compare_set", key, expected, desired)
        return bytes(self.inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        self.count("delete_key", key)
        return bool(self.inner.delete_key(key))

    def clone(self) -> Any:
        """Return a store whose requests are not counted: a rank polls it for failures."""
        return self.inner.clone()

    def has_extended_api(self) -> bool:
        return bool(self.inner.has_extended_api())  # local, not a request

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self.inner.multi_get(keys)
        self.count("multi_get", *keys, *values)
        return values

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.count("multi_set", *keys, *values)
        self.inner.multi_set(keys, values)

    @property
    def num_requests(self) -> int:
        return sum(self.requests.values())
