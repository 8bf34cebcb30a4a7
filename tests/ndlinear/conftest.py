import functools

import pytest
import torch


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fully_shard(one_process):
    """That of FSDP2 on the processors of a group of one process; where torch has none, a test is left out."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return functools.partial(fsdp.fully_shard, mesh=mesh)
