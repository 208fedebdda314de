"""Will it help, with which setting, by how much? Probe the network, profile the model, price, simulate, choose, explain."""

from thinwire.fusion import ModelProfile, Noise
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost, measure_codec, relative_error
from thinwire.plan.collectives import Link, collective_s, parse_link
from thinwire.plan.drawing import draw
from thinwire.plan.host import host_curve
from thinwire.plan.ledger import ErrorLedger, Quotas
from thinwire.plan.network import Network, fit_link, network_at, network_of_link
from thinwire.plan.price import Price, Pricer
from thinwire.plan.probe import Probe, measure_codecs, measure_network
from thinwire.plan.profiling import profile_model
from thinwire.plan.result import Candidate, Plan
from thinwire.plan.search import Budget, Quality, candidate_specs, choose
from thinwire.plan.step import GroupWork, Message, Simulated, simulate_groups

__all__ = [
    "Budget",
    "Candidate",
    "Cluster",
    "CodecCost",
    "ErrorLedger",
    "GroupWork",
    "Link",
    "Message",
    "ModelProfile",
    "Network",
    "Noise",
    "Plan",
    "Price",
    "Pricer",
    "Probe",
    "Quality",
    "Quotas",
    "Simulated",
    "candidate_specs",
    "choose",
    "collective_s",
    "draw",
    "fit_link",
    "host_curve",
    "measure_codec",
    "measure_codecs",
    "measure_network",
    "network_at",
    "network_of_link",
    "parse_link",
    "profile_model",
    "relative_error",
    "simulate_groups",
]
