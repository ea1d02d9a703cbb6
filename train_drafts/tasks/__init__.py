"""What is trained: a task says which parameters, from which of the target's states, and with which loss."""

from train_drafts.tasks.base import Task
from train_drafts.tasks.eagle import Eagle
from train_drafts.tasks.medusa import Medusa

TASKS: dict[str, type[Task]] = {"medusa": Medusa, "eagle": Eagle}
