"""Hypothesis strategies for buckets: ready times and costs.  Times are whole numbers, so that sums are exact."""

from hypothesis import strategies as st

from megabatch.planning.pipeline import Costs

seconds = st.integers(0, 20).map(float)
some_seconds = st.integers(1, 20).map(float)
crossing = st.builds(Costs, seconds, some_seconds, seconds, st.just(True))
staying = st.builds(Costs, some_seconds, st.just(0.0), st.just(0.0), st.just(False))
buckets = st.lists(st.tuples(seconds, crossing | staying), min_size=1, max_size=8)
