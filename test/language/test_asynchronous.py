# SPDX-License-Identifier: Apache-2.0
"""Names of Hopper's own order: what each records, where it is refused."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike, walk
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Role
from torch_tile.language.asynchronous import pin_results
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults


def recorded(use, threads=256, **options):
    """What `use(barriers)` leaves in a kernel, as text."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(4, 6, threads=threads, **options) as (bx, by):  # noqa: RUF059
            bar = T.alloc_barrier(128, (3,))
            use(bar)

    stmts = kernel.program.kernels[0].body.stmts
    return "\n".join(repr(s) for s in stmts if not isinstance(s, Alloc))


def called(name, *args, options=()):
    given = [f'"{name}"', *args, "dtype=T.int32", *([f"options={options}"] if options else [])]
    return f"T.evaluate(T.call({', '.join(given)}))"


AT = "T.address_of(bar[1])"
RECORDS = {
    "mbarrier_wait_parity": (lambda bar: T.mbarrier_wait_parity(bar[1], 1), called("mbarrier_wait", AT, "1")),
    "barrier_wait": (lambda bar: T.barrier_wait(bar[1]), called("mbarrier_wait", AT, "0")),
    "mbarrier_arrive": (lambda bar: T.mbarrier_arrive(bar[1]), called("mbarrier_arrive", AT)),
    "barrier_arrive": (lambda bar: T.barrier_arrive(bar[1]), called("mbarrier_arrive", AT)),
    "mbarrier_expect_tx": (lambda bar: T.mbarrier_expect_tx(bar[1], 4096), called("mbarrier_expect", AT, "4096")),
    "mbarrier_arrive_expect_tx": (
        lambda bar: T.mbarrier_arrive_expect_tx(bar[1], 64),
        called("mbarrier_expect", AT, "64") + "\n" + called("mbarrier_arrive", AT),
    ),
    "fence_proxy_async": (lambda bar: T.fence_proxy_async(), called("fence_proxy_async")),
    "sync_threads": (lambda bar: T.sync_threads(2, 128), called("named_barrier", options=(2, 128))),
    "sync_threads of all": (lambda bar: T.sync_threads(2), called("named_barrier", options=(2, 256))),
    "named_barrier_arrive": (
        lambda bar: T.named_barrier_arrive(15, 128), called("named_barrier_arrive", options=(15, 128)),
    ),
    "pdl_sync": (lambda bar: T.pdl_sync(), called("grid_wait")),
    "pdl_trigger": (lambda bar: T.pdl_trigger(), called("grid_launch")),
    "cluster_sync": (lambda bar: T.cluster_sync(), called("cluster_arrive") + "\n" + called("cluster_wait")),
    "no_set_max_nreg": (lambda bar: T.no_set_max_nreg(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_recorded(name):
    use, text = RECORDS[name]
    assert recorded(use) == text


def test_one_mbarrier_needs_no_index():
    def use(bar):
        one = T.alloc_barrier(1)
        T.barrier_wait(one, 0)
        T.mbarrier_arrive(one)

    at = "T.address_of(x[0])"
    assert recorded(use) == called("mbarrier_wait", at, "0") + "\n" + called("mbarrier_arrive", at)


INDICES = {
    "warpgroup": (T.get_warp_group_idx, "thread // 128"),
    "warp": (T.get_warp_idx, "thread // 32"),
    "lane": (T.get_lane_idx, "thread % 32"),
    "elected of the block": (T.shuffle_elect, "thread == 0"),
    "elected of a warpgroup": (lambda: T.shuffle_elect(128), "thread % 128 == 0"),
    "cluster": (lambda: T.get_cluster_id(1), "by // 3"),
    "rank": (T.block_rank_in_cluster, "by % 3 * 2 + bx % 2"),
    "dims": (T.get_cluster_dims, "(2, 3, 1)"),
}


@pytest.mark.parametrize("name", INDICES)
def test_who_runs(name):
    make, text = INDICES[name]
    seen = []
    recorded(lambda bar: seen.append(make()), cluster_dims=(2, 3))
    assert repr(seen[0]) == text


WRONG = {
    "no barrier": (lambda bar: T.mbarrier_arrive(3), "mbarrier"),
    "several barriers": (lambda bar: T.mbarrier_arrive(bar), "mbarrier"),
    "no such parity": (lambda bar: T.mbarrier_wait_parity(bar[0], 2), "parity"),
    "a fractional parity": (lambda bar: T.barrier_wait(bar[0], 0.5), "parity"),
    "another block": (lambda bar: T.mbarrier_arrive(bar[0], 1), "cta_id"),
    "too many bytes": (lambda bar: T.mbarrier_expect_tx(bar[0], 2**20), "tx"),
    "fewer than none": (lambda bar: T.mbarrier_arrive_expect_tx(bar[0], -1), "tx"),
    "number 0": (lambda bar: T.named_barrier_arrive(0, 64), "barrier_id"),
    "part of a warp": (lambda bar: T.named_barrier_arrive(1, 16), "arrive_count"),
    "part of a warp elects": (lambda bar: T.shuffle_elect(48), "extent"),
    "registers outside roles": (lambda bar: T.set_max_nreg(24, 0), "n"),
    "no such dimension": (lambda bar: T.get_cluster_id(2), "dim"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    use, argument = WRONG[name]
    with pytest.raises(TileError) as caught:
        recorded(use)
    assert caught.value.code == "bad_argument" and f"argument `{argument}`" in str(caught.value)


@pytest.mark.parametrize("n", [0, 20, 264, 24.0])
def test_registers_that_a_thread_cannot_have(n):
    def use(bar):
        with T.ws(0):
            T.inc_max_nreg(n)

    with pytest.raises(TileError) as caught:
        recorded(use)
    assert caught.value.code == "bad_argument" and "argument `n`" in str(caught.value)


NAMES = (
    T.fence_proxy_async, T.pdl_sync, T.pdl_trigger, T.cluster_sync, T.block_rank_in_cluster, T.get_cluster_id,
    T.get_warp_idx, T.no_set_max_nreg, T.wait_wgmma, lambda: T.mbarrier_arrive(0), lambda: T.set_max_nreg(24, 0),
    lambda: T.sync_threads(1, 32), lambda: T.at_rank(0, 0), lambda: T.ws(0), lambda: T.wgmma_gemm(0, 0, 0),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_outside_a_kernel(number):
    with pytest.raises(TileError) as caught:
        NAMES[number]()
    assert caught.value.code == "not_in_kernel"


def test_what_only_orders_is_nothing_on_a_cpu():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32, cluster_dims=2) as bx:
            T.pdl_sync()
            T.fence_proxy_async()
            for i in T.Parallel(32):
                A[bx * 32 + i] += T.get_cluster_id() + 2 * T.block_rank_in_cluster()
            T.cluster_sync()
            T.pdl_trigger()

    for run in (lambda x: evaluate(kernel, x), torch_tile.compile(kernel, target="cpu")):
        x = torch.zeros(64)
        run(x)
        assert x[:32].eq(0).all() and x[32:].eq(2).all()


def refused(use, target, threads=128, arrives=False, **options):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(4, threads=threads, **options) as _:
            bar = T.alloc_barrier([128] * 2)
            use(bar)  # here
            if arrives:
                T.mbarrier_arrive(bar[1])

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target=target)
    assert caught.value.code == "unsupported_on_target" and target in str(caught.value)
    return caught.value.span.source()


ORDERED = ("mbarrier_wait_parity", "mbarrier_arrive", "mbarrier_expect_tx", "sync_threads", "named_barrier_arrive")


@pytest.mark.parametrize("name", ORDERED)
def test_cpus(name):
    assert f"T.{name}(" in refused(RECORDS[name][0], "cpu", arrives="wait" in name)


@pytest.mark.parametrize("name", ["mbarrier_wait_parity", "mbarrier_arrive", "mbarrier_expect_tx"])
def test_gpus_without_mbarriers(name):
    assert f"T.{name}(" in refused(RECORDS[name][0], "cuda:sm_80", arrives="wait" in name)


@pytest.mark.parametrize("name", ["fence_proxy_async", "cluster_sync"])
def test_older_gpus(name):
    assert f"T.{name}(" in refused(RECORDS[name][0], "cuda:sm_80")


def test_early_starts_are_nothing_on_older_gpus():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            T.pdl_sync()
            for i in T.Parallel(64):
                A[i] = B[i]
            T.pdl_trigger()

    for target, early in (("cuda:sm_80", False), ("cuda:sm_90", True)):
        compiled = torch_tile.compile(kernel, target=target)
        assert [entry.early for entry in compiled.launcher.source.entries] == [early]
        # Loads by restricted pointers could move in front of the wait.
        assert ("float* B" in compiled.source, "float* __restrict__ B" in compiled.source) == (early, not early)
        assert compiled.cubin


def neighbour(cluster=2, element=lambda tile, i: tile[i]):
    """Each block of a cluster stores what the other one's tile holds."""

    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(4, threads=32, cluster_dims=cluster) as bx:
            tile = T.alloc_shared((32,), "float32")
            T.copy(A[bx * 32], tile)
            T.cluster_sync()
            for i in T.Parallel(32):
                C[bx * 32 + i] = T.at_rank(element(tile, i), 1 - T.block_rank_in_cluster())
            T.cluster_sync()

    return kernel


def test_tiles_of_other_blocks():
    a, c = torch.randn(128), torch.zeros(128)
    evaluate(neighbour(), a, c)
    assert torch.equal(c, a.view(2, 2, 32).flip(1).flatten())
    for target in ("cpu", "cuda:sm_80"):
        with pytest.raises(TileError) as caught:
            torch_tile.compile(neighbour(), target=target)
        assert caught.value.code == "unsupported_on_target" and target in str(caught.value)


WRONG_ELEMENTS = {
    "no cluster": {"cluster": None},
    "a row": {"element": lambda tile, i: tile[0:4]},
    "a number": {"element": lambda tile, i: 3},
    "registers": {"element": lambda tile, i: T.alloc_local((32,), "float32")[i]},
}


@pytest.mark.parametrize("name", WRONG_ELEMENTS)
def test_what_is_no_element_of_a_tile(name):
    with pytest.raises(TileError) as caught:
        neighbour(**WRONG_ELEMENTS[name])
    assert caught.value.code == "bad_argument" and "argument `element`" in str(caught.value)


def test_clusters_on_older_gpus():
    def use(bar):
        T.sync_threads()

    assert "with T.Kernel(4" in refused(use, "cuda:sm_80", cluster_dims=2)


def kernel_of(body, threads=128):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), n: T.int32):
        with T.Kernel(1, threads=threads) as _:
            a = T.alloc_shared((64, 64), "float16")
            T.copy(A, a)
            c = T.alloc_fragment((64, 64), "float32")
            d = T.alloc_fragment((64, 64), "float32")
            e = T.alloc_fragment((64, 64), "float32")
            body(a, {"c": c, "d": d, "e": e}, n)

    return kernel


def order(kernel):
    """Waits and results in the order of the text, as `2: c d`; loops in brackets."""

    def text(node):
        if isinstance(node, WgmmaResults):
            return [node.C.buffer.name]
        if isinstance(node, Do) and node.call.name == "wgmma_wait":
            return [f"{node.call.options[0]}:"]
        if isinstance(node, For):
            return ["[", *text(node.body), "]"]
        if isinstance(node, Block):
            return [word for s in node.stmts for word in text(s)]
        if isinstance(node, If):
            return text(node.then) + text(node.otherwise)
        return text(node.body) if isinstance(node, Role) else []

    return " ".join(text(kernel.program.kernels[0].body))


def start(a, c):
    T.wgmma_gemm(a, a, c)


def straight(a, f, n):
    start(a, f["c"])
    start(a, f["d"])
    start(a, f["c"])
    T.wait_wgmma(2)  # of c two, one is in flight
    T.wait_wgmma(1)
    start(a, f["e"])
    T.wait_wgmma(1)
    T.wait_wgmma()
    T.wait_wgmma(0)


def deferred(a, f, n):
    for _ in T.serial(n):
        start(a, f["c"])
        T.wait_wgmma(1)
    T.wait_wgmma(0)


def across_turns(a, f, n):
    for _ in T.serial(n):
        start(a, f["c"])
        T.wait_wgmma(1)
        start(a, f["d"])
    T.wait_wgmma(0)


@T.macro
def branches(a, f, n):
    start(a, f["c"])
    if n > 3:
        start(a, f["d"])
    else:
        start(a, f["e"])
    T.wait_wgmma(1)
    T.wait_wgmma(0)


def inner_loops(a, f, n):
    for _ in T.serial(n):
        for _ in T.serial(n):
            start(a, f["c"])
        T.wait_wgmma(1)  # of d, if the inner loop did not run
        start(a, f["d"])
    T.wait_wgmma(0)


def synchronous(a, f, n):
    start(a, f["c"])
    T.gemm(a, a, f["d"])
    T.wait_wgmma(0)


ORDERS = {
    straight: "2: 1: d 1: c 0: e 0:",
    deferred: "[ 1: ] 0: c",
    across_turns: "[ 1: d ] 0: c d",
    branches: "1: c 0: d e",
    inner_loops: "[ [ ] 1: ] 0: c d",
    synchronous: "0: c",
}


@pytest.mark.parametrize("body", ORDERS, ids=lambda f: getattr(f, "__name__", "branches"))
def test_waits_complete_what_is_old_enough(body):
    kernel = kernel_of(body)
    assert order(kernel) == ORDERS[body]
    block = kernel.program.kernels[0].body
    assert alike(pin_results(block), block)  # once is enough


def test_a_role_waits_for_its_own_products():
    def roles(a, f, n):
        with T.ws(0):
            start(a, f["c"])
            T.wait_wgmma(0)
        with T.ws(1):
            start(a, f["d"])
            T.wait_wgmma(0)

    assert order(kernel_of(roles, threads=256)) == "0: c 0: d"


def test_a_kernel_without_waits_stays_as_it_is():
    body = kernel_of(lambda a, f, n: T.gemm(a, a, f["c"])).program.kernels[0].body
    assert pin_results(body) is body


def test_what_is_recorded_products():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.wgmma_gemm(a, a, c, transpose_B=True, clear_accum=True)

    (op,) = (n for n in walk(kernel.program) if isinstance(n, Gemm))
    assert (op.wg_wait, op.wgmma, op.transpose_A, op.transpose_B, op.clear_accum) == (-1, True, False, True, True)
    assert "T.gemm(a, a, c, transpose_B=True, clear_accum=True, wg_wait=-1, wgmma=True)" in repr(kernel)


@pytest.mark.parametrize("pending", [-1, 8, 1.5, "all"])
def test_wrong_waits(pending):
    with pytest.raises(TileError) as caught:
        kernel_of(lambda a, f, n: T.wait_wgmma(pending))
    assert caught.value.code == "bad_argument" and "`pending`" in str(caught.value)


def test_values_are_those_of_a_product_at_once():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.wgmma_gemm(a, a, c, clear_accum=True)
            T.wait_wgmma(0)
            T.copy(c, C)

    x = torch.randn(64, 64).half()
    want = x.float() @ x.float()
    for run in (lambda y: evaluate(kernel, x, y), lambda y: torch_tile.compile(kernel, target="cpu")(x, y)):
        y = torch.empty(64, 64)
        run(y)
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)


def test_barriers_by_keyword():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            ready = T.alloc_barrier(64)
            T.barrier_arrive(mbarrier=ready[0])
            T.barrier_wait(mbarrier=ready[0], parity=0)
            T.mbarrier_arrive(mbarrier=ready[0])
            T.mbarrier_wait_parity(mbarrier=ready[0], parity=1)
            T.barrier_arrive(barrier_id=ready[0])
            T.barrier_wait(barrier_id=ready[0], parity=0)
            A[T.get_thread_binding()] = T.clamp(T.get_warp_idx(32), min_val=0, max_val=1)

    a = torch.zeros(64, dtype=torch.int32)
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a)
    assert not findings and torch.equal(a, torch.arange(64).int() // 32)


@pytest.mark.parametrize("rows, columns, dtype", [(1, 1024, "float32"), (4, 512, "float16"), (1, 384, "int8")])
def test_rows_wider_than_a_box(rows, columns, dtype, seed):
    """By names of PTX and TileLang, some of which have nothing to do here."""

    @T.prim_func
    def kernel(A: T.Tensor((2 * rows, columns), dtype), B: T.Tensor((2 * rows, columns), dtype)):
        with T.Kernel(2, threads=128) as bx:
            tile, bar = T.alloc_shared((rows, columns), dtype), T.alloc_barrier(1)
            T.annotate_layout({tile: T.make_linear_layout(tile)})
            T.ptx_fence_barrier_init()
            T.tma_copy(A[bx * rows, 0], tile, barrier=bar[0])
            if T.get_thread_binding() == 0:
                T.ptx_arrive_barrier(bar[0])
            T.ptx_wait_barrier(bar[0], 0)
            T.tma_copy(tile, B[bx * rows, 0])
            T.tma_store_arrive()
            T.tma_store_wait(0)

    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    a = torch.randint(-100, 100, (2 * rows, columns)).to(getattr(torch, dtype))
    b = torch.zeros_like(a)
    findings = made.interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(a, b) and "tma_store" in made.get_kernel_source() and not made.cubin.warnings


def test_products_with_the_names_of_ptx(seed):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(c)
            T.warpgroup_fence_operand(c, num_regs=32)
            T.warpgroup_arrive()
            T.wgmma_gemm(a, a, c)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(c)
            T.copy(c, C)

    a, c = torch.randint(-3, 4, (64, 64)).half(), torch.zeros(64, 64)
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a, c)
    assert not findings, findings.report()
    assert torch.equal(c, a.float() @ a.float())


def test_arrivals_at_blocks_of_a_cluster():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32, cluster_dims=2) as bx:
            bar, tx = T.alloc_cluster_barrier([64]), T.get_thread_binding()
            if T.block_rank_in_cluster() == 0:
                A[bx] = 1
            T.mbarrier_arrive(bar[0], cta_id=0)
            T.ptx_arrive_cluster_barrier(bar[0], 1)
            T.mbarrier_wait_parity(bar[0], 0)
            if tx == 0:
                A[bx] += 10
            T.cluster_sync()

    a = torch.zeros(4).int()
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a)
    assert not findings, findings.report()
    assert a.tolist() == [11, 10, 11, 10]


@pytest.mark.parametrize("name", ["mbarrier_arrive", "alloc_cluster_barrier"])
def test_other_blocks_are_those_of_a_cluster(name):
    with pytest.raises(TileError, match="cluster_dims"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=32):
                bar = T.alloc_barrier(32)
                T.alloc_cluster_barrier(32) if name == "alloc_cluster_barrier" else T.mbarrier_arrive(bar[0], 1)


@pytest.mark.parametrize("by_elements", [False, True])
def test_arrivals_behind_asynchronous_copies(by_elements):
    """A gathering warpgroup arrives when its own copies have; the other one multiplies."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), at: T.Tensor((64,), "int32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            ready = T.alloc_barrier(128)
            if tx >= 128:
                for r in T.serial(4):
                    row = r * 16 + (tx - 128) // 8
                    if by_elements:
                        with T.attr("default", "async_scope", 1):
                            for v in T.vectorized(8):
                                tile[row, (tx - 128) % 8 * 8 + v] = A[at[row], (tx - 128) % 8 * 8 + v]
                    else:
                        column = (tx - 128) % 8 * 8
                        T.ptx_cp_async(T.access_ptr(tile[row, column], "w"), T.access_ptr(A[at[row], column], "r"), 8)
                T.cp_async_barrier_noinc(ready[0])
            else:
                T.mbarrier_wait_parity(ready[0], 0)
                T.clear(total)
                T.gemm(tile, tile, total, transpose_B=True)
                T.copy(total, C)

    a, c = torch.randn(64, 64).half(), torch.zeros(64, 64)
    at = torch.randint(0, 64, (64,), dtype=torch.int32)
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a, at, c)
    assert not findings, findings.report()
    rows = a[at.long()].float()
    torch.testing.assert_close(c, rows @ rows.T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("counts", "turns"), [((128, 128, 128, 128), None), (([128] * 4,), None), ((128, 128, 64, 64), range(4))]
)
def test_mbarriers_by_their_numbers(counts, turns):
    """Two stages between loading and storing warps; mbarriers 2 and 3 say that a stage is free."""
    listed = counts[0] if isinstance(counts[0], list) else counts
    numbers = None if turns is None else tuple(turns)  # constants: mbarriers of different counts are no array

    @T.macro
    def load(A, tile, k):
        T.mbarrier_wait_parity(mbarrier=k % 2 + 2, parity=k // 2 % 2 ^ 1)
        T.copy(A[0:16, k * 32 : k * 32 + 32], tile[k % 2, :, :])
        T.mbarrier_arrive(mbarrier=k % 2)

    @T.macro
    def store(tile, B, k):
        T.mbarrier_wait_parity(T.get_mbarrier(k % 2), k // 2 % 2)
        T.copy(tile[k % 2, :, :], B[0:16, k * 32 : k * 32 + 32])
        T.mbarrier_arrive(k % 2 + 2)

    @T.prim_func
    def kernel(A: T.Tensor((16, 128), "float16"), B: T.Tensor((16, 128), "float16")):
        with T.Kernel(1, threads=128 + listed[2]):
            tile = T.alloc_shared((2, 16, 32), "float16")
            T.create_list_of_mbarrier(*counts)
            with T.role(0, 128, by_hand=True):
                if numbers is None:
                    for k in T.serial(4):
                        load(A, tile, k)
                else:
                    for n in numbers:
                        load(A, tile, n)
            with T.role(128, listed[2], by_hand=True):
                if numbers is None:
                    for k in T.serial(4):
                        store(tile, B, k)
                else:
                    for n in numbers:
                        store(tile, B, n)

    a, b = torch.randn(16, 128).half(), torch.zeros(16, 128).half()
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "use",
    [
        lambda block: T.create_list_of_mbarrier(), lambda block: T.create_list_of_mbarrier(32),
        lambda block: T.get_mbarrier(2), lambda block: T.mbarrier_arrive(-1), lambda block: T.get_mbarrier(block),
    ],
)  # fmt: skip
def test_mbarriers_that_no_list_has(use):
    with pytest.raises(TileError, match="bad_argument"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(4, threads=64) as block:
                T.create_list_of_mbarrier(32, 64)
                use(block)
