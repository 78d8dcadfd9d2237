from .inputs import find_inputs as find_inputs
from .job import preprocess as preprocess
from .readers import read_texts as read_texts
from .settings import Limits as Limits
from .settings import PreprocessSettings as PreprocessSettings
