import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import SECTION_ALIGNMENT, Geometry, layout, layout_of, new_header
from kvsidecar.errors import InvalidRequest

dtypes = st.sampled_from([DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32])


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 16, 64]), dtypes, st.sampled_from([16, 8, 4]),
       st.integers(1, 300), st.sampled_from([0, 128]))  # fmt: skip
def test_sections_are_aligned_and_disjoint(
    layers: int, heads: int, dim: int, dtype: int, bits: int, tokens: int, start: int
) -> None:
    header = new_header(Geometry(layers, heads, dim, dtype, bits), [7] * tokens, start)  # type: ignore[arg-type]
    found = layout_of(header)
    assert header.payload_bytes == found.size_bytes
    end = 0
    for section in found.sections:
        assert section.offset % SECTION_ALIGNMENT == 0
        assert section.offset >= end
        end = section.offset + section.size_bytes
    assert end == found.size_bytes
    views = found.arrays(memoryview(bytearray(found.size_bytes)))
    assert views["keys"].shape[:3] == (layers, tokens, heads)


@pytest.mark.parametrize(
    ("geometry", "tokens", "group", "sinks", "named"),
    [
        (Geometry(1, 1, 8, DATA_TYPE_FLOAT32, 5), 4, 0, 0, "bits is 5"),
        (Geometry(1, 1, 8, 0, 16), 4, 0, 0, "dtype is 0"),
        (Geometry(0, 1, 8, DATA_TYPE_FLOAT32, 16), 4, 0, 0, "0 layers"),
        (Geometry(1, 1, 7, DATA_TYPE_FLOAT32, 16), 4, 0, 0, "7 channels"),
        (Geometry(1, 1, 8, DATA_TYPE_FLOAT32, 16), 5000, 0, 0, "5000 tokens"),
        (Geometry(1, 1, 8, DATA_TYPE_FLOAT32, 8), 4, 0, 0, "key_group_tokens is 0"),
        (Geometry(1, 1, 8, DATA_TYPE_FLOAT32, 8), 4, 8, 9, "sink_tokens is 9"),
    ],
)
def test_what_cannot_be_laid_out_is_named(geometry: Geometry, tokens: int, group: int, sinks: int, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        layout(geometry, tokens, group, sinks)
