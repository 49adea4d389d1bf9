"""What ranks ask of the store that they find each other by."""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):
    """How often, and how many bytes.  Whatever is built on it is counted: a PrefixStore, a process group."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner or dist.HashStore()
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
