"""Test the HLO parser on short, handwritten programs."""

import textwrap

from transformer_jax.compilation.hlo import Collectives, count_executions, read_collectives
from transformer_jax.compilation.hlo import read_computations as read


def collectives_of(text: str) -> list[Collectives]:
    return read_collectives(textwrap.dedent(text))


def test_a_combined_collective_is_counted_for_each_data_type() -> None:
    # 16 x 8 bfloat16 numbers take 256 bytes, and 8 + 1 float32 numbers take 36 bytes.
    assert collectives_of("""\
        HloModule jit_train_step, is_scheduled=true

        %add (x: f32[], y: f32[]) -> f32[] {
          %x = f32[] parameter(0)
          ROOT %sum = f32[] add(%x, %x)
        }

        ENTRY %main (p: f32[8]) -> f32[] {
          %p = f32[8]{0:T(256)} parameter(0)
          %all-reduce.1 = (bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8]{0}, /*index=2*/f32[]) \
all-reduce(%a, %p, %b), channel_id=1, to_apply=%add
          ROOT %all-reduce.2 = f32[4]{0} all-reduce(%c), channel_id=2, to_apply=%add
        }
        """) == [Collectives("all-reduce", "bf16", 1, 256), Collectives("all-reduce", "f32", 2, 52)]


def test_the_operands_of_an_asynchronous_collective_do_not_count() -> None:
    assert collectives_of("""\
        ENTRY %main (p: f32[8]) -> f32[] {
          %all-gather-start = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), channel_id=1
          %all-gather-done = f32[8]{0} all-gather-done(%all-gather-start)
          %reduce-scatter-start = ((f32[8]{0:T(8,128)}, bf16[8]{0}), (f32[2]{0}, bf16[2]{0})) \
reduce-scatter-start(%p, %q), channel_id=2
          %reduce-scatter-done = (f32[2]{0}, bf16[2]{0}) reduce-scatter-done(%reduce-scatter-start)
          %all-reduce-start = (f32[4]{0}, f32[4]{0}) all-reduce-start(%a, %b), channel_id=3
          %all-reduce-done = (f32[4]{0}, f32[4]{0}) all-reduce-done(%all-reduce-start)
          %permute = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%c), channel_id=4
          ROOT %permute-done = f32[3]{0} collective-permute-done(%permute)
        }
        """) == [
        Collectives("all-gather", "f32", 1, 32),
        Collectives("all-reduce", "f32", 1, 32),
        Collectives("collective-permute", "f32", 1, 12),
        Collectives("reduce-scatter", "bf16", 1, 4),
        Collectives("reduce-scatter", "f32", 1, 8),
    ]


LOOP = """\
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %permute = f32[4]{0} collective-permute(%x), channel_id=7
}

%condition (p: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%update (p: f32[4]) -> f32[4] {
  ROOT %gather = f32[4]{0} all-gather(%p), channel_id=8
}

%skip (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%never-called (p: f32[4]) -> f32[4] {
  ROOT %gather.2 = f32[4]{0} all-gather(%p), channel_id=9
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %cond = f32[4] conditional(%is_finite, %p, %p), branch_computations={%skip, %update}
}
"""


def test_a_collective_in_a_loop_counts_once_per_iteration() -> None:
    computations, entry = read(LOOP)
    executions = count_executions(computations, entry)
    assert executions == {"main": 1, "body": 5, "condition": 5, "skip": 1, "update": 1}
    assert read_collectives(LOOP) == [
        Collectives("all-gather", "f32", 1, 16),
        Collectives("collective-permute", "f32", 5, 80),
    ]
    without_count = LOOP.replace('"known_trip_count":{"n":"5"}', "")
    assert Collectives("collective-permute", "f32", 1, 16) in read_collectives(without_count)


def test_a_collective_in_several_fusions_of_a_tpu_counts_once() -> None:
    # Two collectives share a channel. The first collective appears in three fusions: one starts it,
    # one does other work at the same time, and one ends it.
    assert collectives_of("""\
        %fused_computation.1 (p: bf16[4]) -> (bf16[4], bf16[8]) {
          %all-gather.1 = bf16[8]{0} all-gather(%p), channel_id=1
          ROOT %c = (bf16[8]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
        }

        %async_collective_fusion.2 (p: bf16[4], q: bf16[8]) -> bf16[8] {
          %all-gather.2 = bf16[8]{0} all-gather(%p), channel_id=1
          ROOT %add = bf16[8]{0} add(%q, %all-gather.2)
        }

        %fused_computation.3 (p: bf16[4]) -> bf16[8] {
          %all-gather.3 = bf16[8]{0} all-gather(%p), channel_id=1
          ROOT %c = bf16[8] custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
        }

        %fused_computation.4 (p: bf16[2]) -> (bf16[2], bf16[4]) {
          %all-gather.4 = bf16[4]{0} all-gather(%p), channel_id=1
          ROOT %c = (bf16[4]) custom-call(%all-gather.4), custom_call_target="AsyncCollectiveStart"
        }

        ENTRY %main (p: bf16[4], q: bf16[8], r: bf16[2]) -> bf16[8] {
          %start = (bf16[4], bf16[8]) fusion(%p), kind=kCustom, calls=%fused_computation.1
          %work = bf16[8]{0} fusion(%p, %q), kind=kCustom, calls=%async_collective_fusion.2
          %start.2 = (bf16[2], bf16[4]) fusion(%r), kind=kCustom, calls=%fused_computation.4
          ROOT %done = bf16[8]{0} fusion(%p), kind=kCustom, calls=%fused_computation.3
        }
        """) == [Collectives("all-gather", "bf16", 2, 24)]


def test_collectives_of_one_computation_that_share_a_channel_all_count() -> None:
    assert collectives_of("""\
        ENTRY %main (p: f32[8]) -> f32[4] {
          %all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=1, to_apply=%add
          ROOT %all-reduce.2 = f32[4]{0} all-reduce(%q), channel_id=1, to_apply=%add
        }
        """) == [Collectives("all-reduce", "f32", 2, 48)]


def test_a_fused_all_reduce_and_slice_of_a_tpu_is_a_reduce_scatter() -> None:
    assert collectives_of("""\
        %all-reduce-scatter.7 (input: f32[8,4]) -> f32[2,4] {
          %all-reduce.1 = f32[8,4]{1,0} all-reduce(%input), channel_id=1, to_apply=%add
          ROOT %slice = f32[2,4]{1,0} dynamic-slice(%all-reduce.1, %i), dynamic_slice_sizes={2,4}
        }

        ENTRY %main (p: f32[8,4]) -> f32[2,4] {
          ROOT %fusion = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.7
        }
        """) == [Collectives("reduce-scatter", "f32", 1, 32)]


def test_a_program_for_one_device_has_no_collectives() -> None:
    assert read_collectives("ENTRY %main () -> s32[] {\n  ROOT %c = s32[] constant(1)\n}\n") == []
