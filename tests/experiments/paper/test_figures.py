"""Test that figures 1 and 2 match the program that they are drawn from."""

from dataclasses import replace

from oracles import SMALL_MODEL

from experiments.paper.figures import (
    describe_architecture,
    describe_attention,
    draw_figure_1,
    draw_figure_2,
)


def test_figure_1_has_the_sub_layers_of_the_paper() -> None:
    encoder, decoder = describe_architecture(SMALL_MODEL)
    attention, feed_forward = "Multi-Head Attention", "Feed Forward"
    assert encoder.boxes[2:] == [attention, "Add & Norm", feed_forward, "Add & Norm"]
    assert decoder.boxes[2:-2] == [
        *("Masked Multi-Head Attention", "Add & Norm"),
        *(attention, "Add & Norm"),
        *(feed_forward, "Add & Norm"),
    ]
    assert encoder.times == decoder.times == "2 x"
    # The encoder's output goes to the decoder's second attention sub-layer.
    assert decoder.reads == 4
    assert len(encoder.repeated) == 4
    assert len(decoder.repeated) == 6


def test_figure_1_shows_the_depth_of_each_stack() -> None:
    columns = describe_architecture(replace(SMALL_MODEL, num_decoder_layers=1))
    assert [column.times for column in columns] == ["2 x", "1 x"]


def test_figure_1_shows_another_program_if_the_config_has_one() -> None:
    encoder, _ = describe_architecture(replace(SMALL_MODEL, layer_norm="pre", dropout=0.0))
    assert encoder.boxes[2] == "Add & Norm"


def test_figure_2_has_the_operations_of_the_paper() -> None:
    assert describe_attention() == ["MatMul", "Scale", "Mask", "SoftMax", "MatMul"]


def test_the_figures_contain_their_labels_and_do_not_vary() -> None:
    svg = draw_figure_1().svg
    assert "Masked Multi-Head Attention" in svg
    assert svg == draw_figure_1().svg
    assert "Scaled Dot-Product Attention" in draw_figure_2().svg
