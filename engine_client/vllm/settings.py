"""The settings of the vLLM integration: environment variables, which all its processes inherit."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine_client.types import Policy


class EngineSettings(BaseSettings):
    """Each is GRAMMAR_CLIENT_ and its name in capitals: GRAMMAR_CLIENT_TARGET."""

    model_config = SettingsConfigDict(env_prefix="GRAMMAR_CLIENT_", extra="ignore")

    target: str = Field(
        default="",
        description="Where the service listens: unix:PATH or HOST:PORT. Empty switches all of this "
        "off, and vLLM works as without it.",
    )
    region_dir: Path | None = Field(
        default=None,
        description="Directory for shared-memory masks that the service has as its region_dir. "
        "Without one masks come inline: 20 to 40 ms for 256 rows of 128k tokens.",
    )
    step_timeout: float = Field(
        default=2.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that an engine step waits for its masks at most, reconnects included.",
    )
    timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a request waits for its grammar. The engine goes on meanwhile.",
    )
    validate_seconds: float = Field(
        default=0.25,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that the API server waits for a request's grammar before it passes "
        "the request on. One refused by then is an HTTP 400 with the reason; one refused later "
        "ends the request with finish reason `error`, and the reason is in the log. The server "
        "answers nothing else meanwhile, as with vLLM's own validation.",
    )
    policy: Policy = Field(
        default=Policy.FAIL,
        description="What becomes of requests when the service doesn't answer a step: fail (end "
        "them with an error), in_process (a matcher here goes on) or unconstrained.",
    )
    cool_down: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that steps go by policy at once after one timed out.",
    )
    allow_unenforced: bool = Field(
        default=False,
        description="Take schemas of which a part isn't enforced (it is logged) instead of "
        "refusing them with the list.",
    )
