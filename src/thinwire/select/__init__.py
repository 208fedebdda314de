"""Which layers take part in a step, and how much each may send. Importing this package registers its wrappers."""

from thinwire.select.accordion import Accordion
from thinwire.select.hypernet import HyperNet
from thinwire.select.lgreco import LGreCo
from thinwire.select.normgreedy import NormGreedy
from thinwire.select.roundrobin import RoundRobin

__all__ = ["Accordion", "HyperNet", "LGreCo", "NormGreedy", "RoundRobin"]
