import pytest

from quire.platforms.cpu_cgroup import cpu_quota, memory_left


@pytest.fixture
def tree(tmp_path):
    """Writes files below a mount point, and the list of groups the process is in."""

    def make(membership: str, files: dict[str, object]):
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path / "mount", tmp_path / "membership"

    return make


def test_the_tightest_of_the_groups_above_counts(tree):
    files = {
        "cpu.max": "max 100000",
        "a/cpu.max": "150000 100000",
        "a/b/cpu.max": "400000 100000",
        "other/cpu.max": "1000 100000",
    }
    assert cpu_quota(*tree("0::/a/b\n", files)) == 1.5


def test_version_1_by_controller(tree):
    membership = "4:memory:/job\n2:cpu,cpuacct:/job/step\n1:cpuset:/\n0::/\n"
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/job/cpu.cfs_quota_us": 300000,
        "cpu,cpuacct/job/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/job/step/cpu.cfs_quota_us": 50000,
        "cpu,cpuacct/job/step/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 5000,
        "memory/job/memory.limit_in_bytes": 1000,
        "memory/job/memory.usage_in_bytes": 700,
        "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100",
    }
    places = tree(membership, files)
    assert cpu_quota(*places) == 0.5
    assert memory_left(*places) == 400


def test_version_2_memory(tree):
    files = {
        "a/memory.max": 1000,
        "a/memory.current": 900,
        "a/memory.stat": "anon 5\ninactive_file 40\nactive_file 10",
        "a/b/memory.max": "max",
        "a/b/memory.current": 900,
    }
    assert memory_left(*tree("0::/a/b\n", files)) == 150


def test_more_used_than_allowed_leaves_nothing(tree):
    assert memory_left(*tree("0::/\n", {"memory.max": 10, "memory.current": 20})) == 0


def test_a_path_outside_the_container_falls_back_to_existing_groups(tree):
    """In a container without its own view of groups the path is the host's, and the mount is the container's group."""
    assert cpu_quota(*tree("0::/docker/1234\n", {"cpu.max": "200000 100000"})) == 2
    assert cpu_quota(*tree("0::/../sibling\n", {"cpu.max": "200000 100000"})) == 2


@pytest.mark.parametrize("content", ["max 100000", "nonsense", "100000 0", ""])
def test_no_limit_and_nonsense(tree, content):
    assert cpu_quota(*tree("0::/\n", {"cpu.max": content})) is None


def test_nothing_at_all(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path / "nothing") is None
    assert memory_left(tmp_path / "none", tmp_path / "nothing") is None
