import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import SiteError
from holmes_hpc.slurm.hostlist import compress, expand, numbers


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,5],m7", ["n1", "n2", "n3", "n5", "m7"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[007]", ["n007"]),
        ("r[0-1]n[1-2]-ib", ["r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib"]),
        ("a[1,b[2-3],[4-5]]", ["a1", "ab2", "ab3", "a4", "a5"]),
        ("gpu[a,b]", ["gpua", "gpub"]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("n[1", "n1]", "n[]", "n[3-1]", "n[1,,2]", "a,,b", "a,", "]["),
        *("n[1-999999999]", "n[1-999][1-999]", "n[1-99999],m[1-99999]", f"n[1-{'9' * 5000}]", "[" * 5000),
    ],
)
def test_what_is_not_a_host_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SiteError) as error:
        expand(text)
    assert "host list" in str(error.value) and "\n" not in str(error.value)


def test_numbers_of_a_log_never_fill_the_memory() -> None:
    assert numbers("0-2,5,x,7-") == [0, 1, 2, 5, 7] and not numbers("9" * 5000)
    assert len(numbers("0-999999999,0-99999999999")) == 100_000  # any rank may print such a line


def test_compress_keeps_padding_apart() -> None:
    assert compress(["n1", "n2", "n3", "n5", "m7", "n2"]) == "n[1-3,5],m7"
    assert compress(["n9", "n10", "n09"]) == "n[9,09-10]"
    assert compress(["head"]) == "head"
    assert compress(["n1-ib", "n2-ib", "n1"]) == "n1-ib,n2-ib,n1"  # Slurm's own ranges end a name


names = st.from_regex(r"[a-z]{1,3}-?[0-9]{0,3}[a-z]{0,2}", fullmatch=True)


@given(st.lists(names, max_size=40))
def test_round_trip(hosts: list[str]) -> None:
    text = compress(hosts)
    assert sorted(expand(text)) == sorted(set(hosts))
    assert compress(expand(text)) == text


@given(st.text(alphabet="n019-,[]", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except SiteError:
        return
    assert all("[" not in h and "," not in h for h in hosts)
