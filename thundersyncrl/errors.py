"""The exception tree. A message says what was expected, what came, where, and what to do.

    ThunderSyncError
      ConfigError            the user asked for something impossible; raised before a model is loaded or a task runs
        UnsupportedModelError  this model can't be cut exactly at a prefix
        TaskError              a task folder lacks a part, or asks for what the sandbox can't give
      ContractError          a record or a call broke the rules of the ledger or of a protocol
        StaleWorkError         a policy version that isn't the open one
        CoefficientClassError  an estimator's advantages aren't of the class that it declares
      PhaseError             a call out of order (double close, step with open groups)
      RolloutError           recorded on the trajectory, never ends the run
        EngineError, EnvironmentFailure, ToolError, VerifierError, TimeLimitError,
        InvalidOutputError
      NumericsError          a non-finite or mismatching number; ends the run before the optimizer step
      PublishError           the engine did not confirm the new version; ends the run
      WatchdogError          a wait passed its limit

To add one: subclass the nearest class here, and keep it picklable (one string argument).
"""


class ThunderSyncError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(ThunderSyncError, ValueError):
    """The user asked for something impossible; raised before anything is loaded or run."""


class UnsupportedModelError(ConfigError):
    """The model can't be cut exactly at a prefix; the message names the reason."""


class TaskError(ConfigError):
    """A task folder lacks a part, or asks for something that the sandbox can't give."""


class ContractError(ThunderSyncError, ValueError):
    """A record or a call broke the rules that keep gradients exact."""


class StaleWorkError(ContractError):
    """Work, accumulator and step disagree about the policy version."""


class CoefficientClassError(ContractError):
    """An estimator returned advantages that its declared coefficient class can't express."""


class PhaseError(ThunderSyncError, RuntimeError):
    """A call out of order, such as a step while groups are open."""


class RolloutError(ThunderSyncError):
    """Root of failures that are recorded on a trajectory and never end the run."""


class EngineError(RolloutError):
    """The engine could not sample."""


class EnvironmentFailure(RolloutError):
    """The environment could not be set up or lost its state."""


class ToolError(RolloutError):
    """A tool failed for a reason that isn't the model's."""


class VerifierError(RolloutError):
    """The verifier gave no verdict, which is never the same as reward 0."""


class TimeLimitError(RolloutError):
    """A named wait passed its limit; the message says which."""


class InvalidOutputError(RolloutError):
    """The model's output can't be used at all."""


class NumericsError(ThunderSyncError, ArithmeticError):
    """A non-finite number or a mismatch above its bound; raised before the optimizer step."""


class PublishError(ThunderSyncError, RuntimeError):
    """The engine did not confirm the new policy version."""


class WatchdogError(ThunderSyncError, RuntimeError):
    """A wait that has a name passed its limit."""


class WorkerError(ThunderSyncError, RuntimeError):
    """A process of the run ended, or answered what can't be read."""
