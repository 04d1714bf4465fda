"""Both collections: no clean program is told of, and each leak is, with its line and its holder."""

from __future__ import annotations

import pytest

from tests.leaks.play import Found, play
from tests.leaks.programs import CLEAN, LEAKS, Leak, Program

pytestmark = pytest.mark.slow

#: Leaks that are told without the right line, or without the right holder, and why.
_INEXACT = {
    "displayed_loss_keeps_the_old_model": "on the host the line that made the model is not told",
}
#: Leaks that are not told, and why.
UNSEEN = {
    "average_meter_updated_with_tensors": "it is gone when its function returns",
    "finalizers_that_hold_their_object": "weakref's own table is no variable's",
    **dict.fromkeys(
        (
            "activations_appended_by_hooks",
            "attention_maps_kept_by_the_model",
            "dataset_that_caches_augmented_samples",
            "deferred_logging_in_closures",
            "feature_maps_of_a_visualizer",
            "gradients_kept_by_a_monitor",
            "layers_made_in_forward",
            "linked_list_of_states",
            "logs_of_a_trainer_by_step",
            "memory_bank_without_limit",
            "prototypes_added_for_each_batch",
        ),
        "plain tensors that a loop collects are told once they fill a tenth of a GPU",
    ),
    **dict.fromkeys(
        (
            "beam_search_keeps_all_hypotheses",
            "hidden_state_of_streaming_inference",
            "predictions_kept_by_a_metric_object",
            "search_tree_of_latent_states",
            "validation_losses_without_no_grad",
            "value_estimates_of_a_policy",
        ),
        "so are graphs of a loop without an optimizer: a backward pass may come in a later cell",
    ),
}

#: Leaks that may be reported without a line: several lines have added a part each.
_MAY_LACK_LINE = frozenset(
    {
        "adapters_wrapped_again_and_again",
        "contexts_of_a_custom_function",
        "dice_score_summed_up_with_its_graph",
        "exceptions_kept_with_tracebacks",
        "experiments_in_a_dict",
        "hook_registered_in_each_run",
        "losses_appended_with_their_graphs",
    }
)


def is_right(found: Found, leak: Leak) -> bool:
    """Return whether a leak is what was seeded, in time, with its holder and its line."""
    told = found.leak
    return (
        f"{told.unit}s" == leak.found_by
        and (told.unit == "step" or found.run <= 4)
        and any(leak.holder in holder.path for holder in told.holders)
        and (leak.name in _MAY_LACK_LINE if told.line is None else told.line.text in leak.lines)
    )


@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.name)
def test_a_clean_program_is_not_told_of(program: Program) -> None:
    """Whatever it looks like."""
    assert play(program, "cpu") == []


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_is_told_with_its_line_and_its_holder(leak: Leak) -> None:
    """By the fourth run, or within the cell whose loop it is."""
    found = play(leak, "cpu")

    if leak.name in UNSEEN:
        assert found == []
    elif leak.name in _INEXACT:
        assert {f"{each.leak.unit}s" for each in found} == {leak.found_by}
    else:
        assert any(is_right(each, leak) for each in found), found
