"""What a run leaves to go on from."""

from muster.train.checkpoint.manager import CheckpointManager as CheckpointManager
from muster.train.checkpoint.manager import Progress as Progress
from muster.train.checkpoint.manager import Statistics as Statistics
from muster.train.checkpoint.manager import TrainState as TrainState
from muster.train.checkpoint.manager import folder_of as folder_of
from muster.train.checkpoint.manager import is_complete as is_complete
from muster.train.checkpoint.manager import is_one as is_one
from muster.train.checkpoint.manager import load as load
from muster.train.checkpoint.manager import load_newest as load_newest
from muster.train.checkpoint.manager import put_back as put_back
from muster.train.checkpoint.manager import saved as saved
from muster.train.checkpoint.manager import split as split
from muster.train.checkpoint.manager import step_of as step_of
from muster.train.checkpoint.storage import read_index as read_index
