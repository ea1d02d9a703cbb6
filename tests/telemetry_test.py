"""What is logged is kept, however fast a run is stopped and taken up again."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specjax.telemetry import summary_writer


def test_a_writer_that_follows_at_once_adds_to_what_was_written_and_hides_what_it_does_again(tmp_path):
    for start in (1, 3, 4):  # all within a second, each taking the last step again
        with summary_writer(tmp_path, start) as writer:
            for step in (start, start + 1):
                writer.add_scalar("loss", 10 * start + step, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 11),
        (2, 12),
        (3, 33),
        (4, 44),
        (5, 45),
    ]
