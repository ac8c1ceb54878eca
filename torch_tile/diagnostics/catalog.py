# SPDX-License-Identifier: Apache-2.0
"""Every mistake an author can make, as code -> (message, fix). Braces are filled by `diagnose`.

One kernel that must fail with each code lives under test/errors.
"""

CATALOGUE: dict[str, tuple[str, str]] = {
    # front end
    "no_source": (
        "the source of `{name}` cannot be read",
        "define the kernel in a file or a notebook cell. Functions built by exec, or typed at a prompt before Python "
        "3.13, have no source. For generated text, add its lines to linecache.cache under the name given to compile()",
    ),
    "nested_too_deep": (
        "`{name}` nests branches and loops deeper than Python compiles them: each `elif` is one level",
        "look values up in a table, or split the chain in two: `if x < 16: ... else: ...` around macros",
    ),
    "endless_macro": (
        "the macro `{name}` calls itself {count} deep; each call is inlined while tracing, so the depth must be known",
        "end it by a condition on Python's numbers, or write a loop: `for`, `while`",
    ),
    "undefined_name": ("`{name}` is not defined", "define it before this line, or pass it as an argument"),
    "out_of_scope": (
        "`{name}` is used outside the `{region}` in which it was made",
        "use it inside that region, or keep it in a T.alloc_var / T.alloc_fragment made outside",
    ),
    "symbolic_condition": (
        "the truth of a tile expression is not known while tracing",
        "use `if`/`while`/`and`/`or` inside the kernel or a @T.macro, T.if_then_else, or T.max for max()",
    ),
    "rebound_in_region": (
        "`{name}` was bound outside this {region} and is bound again inside it, which would not outlive the region",
        "make it a mutable variable before the region: {name} = T.alloc_var(dtype, init)",
    ),
    "rebound_tile": (
        "`{name}` names the {kind}, and would name a value from here on: nothing is stored in the {kind}",
        "write `{name}[i] = value` for an element, T.fill({name}, value) for all of them, T.copy(source, {name}) for a "
        "tile, or take another name",
    ),
    "rebound_buffer": (
        "`{name}` names a buffer outside this {region} and another one inside it: the body is traced once, so that "
        "later turns would not see it",
        "keep both in one buffer and choose by an index, {name}[turn % 2, ...], or unroll: for turn in (0, 1, 2):",
    ),
    "lost_at_grid_sync": (
        "the barrier `{name}` is used on both sides of T.sync_grid(), which starts another kernel",
        "allocate a barrier of its own behind T.sync_grid()",
    ),
    "unknown_name": ("torch_tile.language has no `{name}`", "{fix}"),
    "absent_name": ("`{name}` is {why}", "write it with functions of torch_tile.language: kernels need nothing else"),
    "only_floats": (
        "T.{name} only supports floating-point inputs, but got {dtype}",
        "convert the value, T.{name}(T.float32(x)); T.{whole} takes any type",
    ),
    "float_predicate": (
        "{op} requires an integer or boolean predicate, got {dtype}",
        "compare the value, {op}(x != 0.0)",
    ),
    "bad_call": ("T.{name}() {why}", "its parameters are ({parameters})"),
    "unknown_keyword": ("T.{name} has no parameter `{keyword}`", "{fix}"),
    "bad_kernel_call": ("{name}() {why}", "{fix}"),
    "bad_function": ("@{decorator} above `{name}`, which is {what}", "{fix}"),
    "kernel_in_kernel": (
        "the kernel `{name}` is called inside a kernel: Python launches kernels; a kernel launches none, nor itself",
        "make `{name}` a function with @T.macro, which is inlined, or call the kernels after each other",
    ),
    "type_as_tensor": (
        "T.Tensor(...) describes a tensor and has no elements, but `{name}` was assigned one and is used as a tensor",
        "declare an argument by a colon, `{name}: T.Tensor(shape, dtype)`; memory for results is T.empty(shape, dtype)",
    ),
    "tuple_as_index": (
        "`{got}` are {count} indices, and are used as one",
        "give each a name where they are made: `with T.Kernel(m, n) as (bx, by):`, `for i, j in T.Parallel(m, n):`; "
        "a block's threads are `T.Kernel(m, threads=128)`",
    ),
    "python_error": (
        "Python cannot run this line: {problem}",
        "Python runs the line once, while it traces the kernel: mend what the line computes with",
    ),
    "python_value": ("Python computes here, with what only the device knows: {problem}", "{fix}"),
    "bad_choice": (
        "`x if c else y` chooses between {got}, and the condition is known only on the device",
        "write an `if` with the statements for each of them; only numbers and tile expressions can be chosen",
    ),
    "reducer_protocol": ("reducer `{name}`: {why}", "{fix}"),
    "not_in_kernel": ("`{what}` is used outside `with T.Kernel(...)`", "move it into the kernel's body"),
    "not_opened": ("T.Kernel stands here without `with`, which opens it", "{fix}"),
    "nested_kernel": ("T.Kernel inside another T.Kernel", "close the first kernel before opening the second"),
    "not_outermost": (
        "`{what}` is used inside a {region}",
        "move it into the kernel's body itself, around or before the {region}",
    ),
    "bad_annotation": (
        "parameter `{name}` has the annotation {got}, which is neither a tensor nor a scalar type",
        "annotate it with T.Tensor(shape, dtype) or a dtype such as T.int32",
    ),
    "unbound_const": (
        "`{name}` does not follow from a dimension or stride of any annotated tensor",
        "use it in a T.Tensor annotation, alone or in a linear expression of known sizes such as `N + 1`",
    ),
    "tensor_not_annotated": (
        "tensor argument `{name}` is never annotated",
        "add `{name}: T.Tensor((M, N), T.float16)` at the top of the kernel; a size or a flag is a plain number",
    ),
    "bad_return": (
        "a kernel can return only tensors made by T.empty, got {got}",
        "allocate the result with T.empty(shape, dtype)",
    ),
    "no_kernel": ("`{name}` returned {got}, not a @T.prim_func", "{fix}"),
    "not_compiled": ("the kernel `{name}` is called before it is compiled", "{fix}"),
    "return_in_region": (
        "`return` inside {where}",
        "compute the value in a T.alloc_var and return after the region; T.thread_return() ends a thread",
    ),
    "bad_break": (
        "`{word}` of a loop that Python runs while tracing, under a condition known only on the device",
        "loop with T.serial, T.unroll or `for ... in range(...)`, or write a condition of the device: `while x < n:`",
    ),
    "break_of_nest": (
        "`break` of a T.grid, which is several loops, would leave the innermost only",
        "nest T.serial loops, and test a flag in each: T.alloc_var(T.bool, False)",
    ),
    "bad_dtype": ("{got!r} is not a dtype", "use T.float16, 'float16', torch.float16, ..."),
    "bad_scope": ("unknown buffer scope {got!r}", "use one of {known}"),
    "bad_shape": ("{what} must be {want}, got {got}", "give every dimension as a positive integer"),
    "wrong_rank": (
        "`{buffer}` has {want} dimensions and is indexed with {got}",
        "give one index per dimension of {shape}",
    ),
    "missing_index": (
        "one value is stored to `{buffer}[{got}]`, {count} of {want} indices: every element there gets it",
        "name an element by an index for each dimension; write `{buffer}[{got}, :]` if all of them are meant",
    ),
    "bad_index": (
        "index {got} of `{buffer}` is not an integer expression",
        "index with integers or integer expressions",
    ),
    "bad_slice": ("a slice of `{buffer}` {why}", "use A[start:stop], with a positive step in T.copy and T.fill only"),
    "region_as_value": (
        "the {kind} `{region}` is used as a value",
        "index single elements inside T.Parallel, or copy the region with T.copy; T.gemm multiplies tiles, and "
        "T.reduce_sum and the like fold them; `X.shape[0]` is a size",
    ),
    "bad_operand": (
        "`{op}` cannot take {got}",
        "use numbers, tile expressions or elements of buffers, A[i, j] in T.Parallel",
    ),
    "unused_value": (
        "`{value}` is computed here, and nothing uses it",
        "store it, `C[i] = ...`, name it, or leave it out; `==` compares and `=` assigns",
    ),
    "sign_behind_equals": (
        "`={sign}` is no operator: the line assigns a value with a sign to `{name}`",
        "write `{name} {sign}= ...` to change it, or put the sign beside its value: `{name} = {sign}...`",
    ),
    "wrong_dtype_store": (
        "a value of dtype {value} is stored into `{buffer}`, which holds {want}",
        "cast it first: T.cast(value, {want})",
    ),
    "bad_loop_range": (
        "{what} takes integer bounds, got {got}",
        "give integers or integer expressions, as `X.shape[0]` of a tensor X",
    ),
    "bad_argument": ("{op}: argument `{name}` {why}", "{fix}"),
    "wrong_value": ("{op} {name} must be {want}, got {got}", "{fix}"),
    "narrow_type": ("{what} takes no elements of {dtype}", "{fix}"),
    # tile ops
    "no_lowering": (
        "T.{name} has no lowering for {target}: its class {owner} does not write `{method}`",
        "write {owner}.{method}, as CONTRIBUTING.md says under Adding a tile op, or compile for another target",
    ),
    "gemm_shape": (
        "T.gemm: {a} x {b} -> {c} do not fit",
        "A is (M, K) or (K, M) with transpose_A, B is (K, N) or (N, K) with transpose_B, C is (M, N)",
    ),
    "gemm_dtype": ("T.gemm: {a} x {b} into {c} is not supported", "{fix}"),
    "gemm_scope": (
        "T.gemm: {operand} `{buffer}` lives in {scope} memory",
        "copy it to shared memory or a fragment first; C must be a fragment, shared or local buffer",
    ),
    "copy_shape": (
        "T.copy: the extents of the source {src} and of the destination {dst} do not match",
        "extents must agree after dropping dimensions of size 1",
    ),
    "copy_values": (
        "T.copy: {what} is not a buffer, region or element",
        "pass A, A[a:b, :] or A[i, j]; T.fill(tile, x) sets all elements to a number",
    ),
    "reduce_shape": (
        "T.{op}: {of} does not give {dst}",
        "give a tile of the shape {wanted}: the result drops the reduced dimension, or keeps it with size 1",
    ),
    "reduce_dim": ("T.{op}: dim {dim} is outside a buffer of {rank} dimensions", "give a dim in [-{rank}, {rank})"),
    "scan_shape": ("T.{op}: {src} and {dst} differ in shape", "source and destination have one shape"),
    "fill_value": ("T.fill: {got} is not a scalar", "give a number or a scalar expression; T.copy copies a tile"),
    "atomic_target": (
        "T.{op}: the destination must be an element or region of a buffer, got {got}",
        "pass A[i, j] or A[a:b, :]",
    ),
    # checks on the whole kernel
    "non_affine_region": (
        "the region of `{buffer}` starts at `{start}`, which is not affine in the loop variables",
        "load single elements with such indices in T.Parallel instead",
    ),
    "dynamic_tile": (
        "on-chip buffer `{buffer}` has the size `{size}`, known only at run time",
        "tile sizes must be compile-time integers: name the size by T.const, or allocate the most that it may be",
    ),
    "out_of_bounds": (
        "index {dim} of `{buffer}` is {index}, always outside [0, {size})",
        "give an index inside {shape}; a negative one counts from the end",
    ),
    "outside": (
        "index {dim} of `{buffer}` is {index}, always outside [0, {size}): reads there give 0, and writes are dropped",
        "give an index inside; a negative one counts from the end",
    ),
    "leaves_tile": (
        "index {dim} of `{buffer}`, {index}, is {value} for {where}, outside [0, {size})",
        "guard it, `if {kept}:`, or mend the extents around it: indices of on-chip buffers must stay inside {shape}",
    ),
    "equal_elements": (
        "`{buffer}` has the shape {shape}, and loops access it at {places} places: it gets them, as all hold one value",
        "allocate it with the shape {places}, or name one element in all iterations",
    ),
    "endless_loop": (
        "nothing in the loop changes what `{condition}` reads: once begun, it never ends",
        "change a variable of the condition in the body, or `break`",
    ),
    "endless_wait": (
        "the kernel waits for `{buffer}`, at which nobody arrives",
        "arrive by T.mbarrier_arrive, behind T.tma_copy(src, dst, barrier=...) if that brings the tile",
    ),
    "stuck_wait": (
        "this waits for parity {parity} of `{name}` forever: {passed} waits of these threads have passed, {complete} "
        "phases are complete, and no thread that can go on arrives",
        "{fix}",
    ),
    "stuck_barrier": (
        "these threads wait at {name} forever: {passed} waits there have passed, {come} of {count} threads have come, "
        "and {why}",
        "{fix}",
    ),
    "same_parity": (
        "each wait here is for parity {parity} of `{buffer}`, of which {count} phases complete: waits pass too early",
        "ask for the other parity in each next phase: `(k // stages) % 2` for iteration k",
    ),
    "miscounted": (
        "`{buffer}` waits for {count} arrivals in each phase, and {come} come: a wait never ends, or ends too early",
        "count the threads that arrive, as in T.alloc_barrier(128): all of a branch do, and T.tma_copy does not arrive",
    ),
    "unwritten": ("`{buffer}` is read here, and no statement before can have written it", "{fix}"),
    "unwritten_element": (
        "an element of `{buffer}` is read here that no statement before has written",
        "write all that is read, as by `T.clear({buffer})`, or guard the read",
    ),
    "perhaps_unwritten": (
        "strict: `{buffer}` is read here, and some path to it has not written all that is read",
        "write it on each path, as by `T.clear({buffer})` before; the kernel's `interpret` finds what a call reads so",
    ),
    "unwritten_result": ("`{buffer}` is returned, but no statement writes it: it would hold garbage", "{fix}"),
    "writes_nothing": (
        "`{name}` writes no tensor: a call of it changes nothing",
        "write a parameter or a result of T.empty, `Y[i] = x` or T.copy(tile, Y)",
    ),
    "unused_parameter": (
        "`{name}` is a parameter, and no statement of the kernel uses it",
        "use it, leave it out of the signature, or begin its name with `_`",
    ),
    "only_updated": (
        "`{buffer}` is returned, and each write only updates what stood there: it would hold garbage",
        "set it first: `T.clear({buffer})` in a T.Kernel before this one, or a parameter that the caller fills",
    ),
    "unwritten_part": (
        "`{part}` is returned, but no statement writes it: it would hold garbage",
        "cover it by the grid and the loops, as by T.ceildiv(N, block) blocks: writes beyond the end are dropped",
    ),
    "unread_tail": (
        "`{part}` is not {verb} here: `{value}` takes {count} steps of {step} elements, and there are {size}",
        "{fix}",
    ),
    "repeated_op": (
        "T.{op} runs for each iteration of T.Parallel({sizes}), and names none of {names}",
        "write it outside of the loop: all threads of the block share its work",
    ),
    "no_iteration": ("{what} has no iteration: it begins at {start} and ends before {stop}", "{fix}"),
    "drawn_once": (
        "Python draws this number once, while the kernel is traced: it is the same for all elements",
        "give the numbers as a tensor, or draw on a GPU: T.rng_init(seed), then T.rng_rand_float()",
    ),
    "slow_product": (
        "tensor cores cannot compute this T.gemm, as {why}: it takes multiply-adds of single elements",
        "{fix}",
    ),
    "narrow_sum": (
        "`{buffer}` sums up {terms} terms in {dtype}, each rounded to its few digits: the result is off",
        "allocate `{buffer}` as float32, and convert the result: T.copy to a tile or tensor of {dtype} does",
    ),
    "not_in_parallel": ("{what}: iterations of a T.Parallel run at once, in no order", "{fix}"),
    "recursive_helper": (
        "`{name}` calls itself under a condition that only the device knows: it is inlined while tracing, without end",
        "write a loop, `for` or `while`, that keeps its state in variables: n = T.alloc_var('int32', 0)",
    ),
    "behind_end": (
        "`{buffer}[{index}]` is read behind the end for {where}, where it gives 0: there are {size} elements",
        "declare one element more, as offsets of n sequences are n + 1 numbers, or guard the read",
    ),
    "past_end": (
        "`{buffer}` ends before half of the loop: `{index}` begins inside for {inside} of {count} values of `{value}`, "
        "as the size is {size}, and reads behind the end give 0",
        "step as the tensor is stored: two values of 4 bits are one byte, and a group of values has one scale",
    ),
    "cleared_sum": (
        "blocks of every `{index}` set `{buffer}` here, when others may have added to it: their sums are lost",
        "set it in a T.Kernel before this one, as by T.clear({buffer}), or let the caller give zeros",
    ),
    "no_blocks": (
        "T.Kernel({grid}) has no block, so that the kernel does nothing",
        "count the tiles rounding up, T.ceildiv(n, block): n // block is 0 where n is below block",
    ),
    "idle_index": (
        "nothing names the block index `{index}`: {count} blocks do the same work, and atomic sums count it each time",
        "name `{index}` in the places that a block reads and writes, give the grid fewer sizes, or call it `_`",
    ),
    "repeated_copy": (
        "this copy brings the same part of `{buffer}` in each iteration of `{index}`",
        "name `{index}` in its place, or copy the tile once before the loop",
    ),
    "far_shift": (
        "`{op}` shifts by up to {most} here, and {dtype} has {bits} bits",
        "take the distance of the part that is meant, `4 * (j % 2)` in a byte, or widen the value first",
    ),
    "kept_sum": (
        "`{buffer}` still holds the sums of earlier iterations of `{index}`, each of which stores it elsewhere",
        "clear it where the iteration begins, T.clear({buffer})",
    ),
    "never_waited": (
        "this copy to `{buffer}` runs on its own, and the kernel never waits for one: it may read older values",
        "wait in front of the first read, T.ptx_wait_group(0), or use T.copy",
    ),
    "no_schedule": (
        "{why}: the loop runs by the compiler's own schedule",
        "give both lists a number for each statement of the body, or leave both out",
    ),
    "float_to_bool": (
        "T.copy of {dtype} to the bools of `{buffer}`: all but 0 become True, 0.25 and NaN too",
        "say what is meant: `for i in T.Parallel(n): {buffer}[i] = x[i] > 0.5`, or `x[i] != 0`",
    ),
    "one_starts": (
        "of the threads that come to this T.tma_copy, {thread} alone starts it, where `{index}` is {value}: the others "
        "name other tiles, which nothing copies",
        "write a copy for each: `for w in T.unroll(n): T.tma_copy(A[w * rows, 0], tile[w, :, :], barrier=full[w])`",
    ),
    "swapped_indices": (
        "indices of `{buffer}` reach {last} in sizes {sizes}: reads behind the end give 0, and writes are dropped",
        "they fit in the other order: swap the indices of dimensions {a} and {b}, the names of the blocks, or the "
        "sizes where `{buffer}` is declared",
    ),
    "unread_write": (
        "nothing reads `{buffer}` after this line has written it",
        "copy `{buffer}` out, or compute with it, behind this line; remove the line if its result is not needed",
    ),
    "block_race": (
        "blocks of every `{index}` write `{buffer}` at this one place, each a value of its own: the last stays",
        "name `{index}` in the place, add up by T.atomic_add, or let one block write: `if {index} == 0:`",
    ),
    "role_race": (
        "this role reads `{buffer}` while another one writes it: neither waits for the other before",
        "hand the tile over by an mbarrier: T.mbarrier_arrive(ready) behind the write, and "
        "T.mbarrier_wait_parity(ready, 0) before this; hand it back by another one",
    ),
    "barrier_as_tile": (
        "`{buffer}` is an array of mbarriers, whose elements are no values",
        "allocate tiles by T.alloc_shared or T.alloc_fragment; wait for mbarriers by T.mbarrier_wait_parity",
    ),
    "iteration_race": (
        "iterations of every `{index}` write `{buffer}` at this one place, each a value of its own: the last stays",
        "name `{index}` in the place, or fold the values by T.reduce_sum and its like",
    ),
    "lost_result": (
        "`{buffer}` is made by T.empty and written, but neither returned nor read",
        "return it; scratch memory is T.alloc_global",
    ),
    "bad_layout": ("{what} is not a layout: {why}", "{fix}"),
    "layout_conflict": (
        "`{buffer}` is needed in two layouts at once",
        "copy it to a second tile (T.copy) and use that for one of the two",
    ),
    "unsupported_on_target": ("{what} is not supported on target {target}", "{fix}"),
    "shared_memory": (
        "a block needs {need} bytes of shared memory; {target} has {limit}",
        "use smaller tiles, fewer stages, or tiles that are not needed at the same time",
    ),
    "parted_threads": (
        "{what} is done by all threads together, but `{condition}` differs between them, so that only some come by",
        "end the branch or loop before it, or give it to whole groups of 128 threads: `with T.ws(0):`",
    ),
    "parted_barrier": (
        "`{what}` waits for all threads of the {whole}, but `{condition}` differs between them: "
        "those that come by wait forever for the others",
        "move it out of the branch or loop, and put only the work under the condition; "
        "to skip work, use such a condition in place of `break`, `continue` and T.thread_return()",
    ),
    "parted_warp": (
        "`{what}` is done by all 32 lanes of a warp together, but `{condition}` differs between them",
        "let whole warps of 32 threads come by, or move it out of the branch or loop, which keeps the other work",
    ),
    "foreign_element": (
        "an element of the fragment `{buffer}` is written by threads that need not own it: {why}",
        "write it in T.Parallel, whose iterations go to the owners, or keep what is a thread's in T.alloc_local",
    ),
    "divergent_hazard": (
        "threads exchange values through `{buffer}` where not all threads of the block pass, so no barrier can stand",
        "end the `if` before the values are read, or let every thread take part",
    ),
    "waiting_hazard": (
        "these threads touch memory that other threads touch, too, and a barrier between them would stop both: "
        "each waits for what the other ones do later",
        "hand it over by an mbarrier, write other places, or end what the others wait for before this",
    ),
    "bulk_copy": ("T.tma_copy cannot be made of bulk copies: {why}", "mend that, or use T.copy"),
    "no_wgmma": (
        "T.wgmma_gemm() requires Hopper WGMMA lowering, and cannot go by wgmma: {why}",
        "mend that, or use T.gemm",
    ),
    "mixed_roles": ("{what} {why}", "{fix}"),
    "registers_of_roles": (
        "the roles ask for more registers than their block has, and would wait for ever: {held} make {need}, and the "
        "block has {most}, {share} for each of its {threads} threads",
        "{fix}",
    ),
    "no_config": (
        "autotune: none of the {count} configurations of `{name}` works",
        "the notes say what went wrong with each: mend that, or give other configurations",
    ),
    "slow_schedule": ("strict: {op} became {became}", "{why}: mend that, or leave out strict=True"),
    "foreign_text": (
        "the author's own text, of which `{name}` is called here, does not compile: {problem}",
        "correct it: it is compiled as it stands; C++ for CPUs is T.import_source(text, target='cpu')",
    ),
    "foreign_meaning": (
        "`{name}` is text of the author's own, which an interpreter cannot look inside",
        "give its meaning in Python: evaluate=f, which takes numbers, and a NumPy array for each pointer",
    ),
    "too_few_registers": (
        "the threads of {name} have {have} registers each, and an instruction needs {need}",
        "take smaller tiles or more threads, or ask for fewer blocks by T.annotate_min_blocks_per_sm",
    ),
    "device_assert": ("device assertion failed: {message}", "see the condition at this line"),
}
