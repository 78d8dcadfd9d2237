"""Not available: data efficiency."""

from deepspeed.unavailable import refuse

refuse("deepspeed.runtime.data_pipeline", "prepare the data set in the program")
