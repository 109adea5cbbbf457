"""Every setting of the service, with its default and what it costs: flags, environment, TOML.

A flag wins over the environment (GRAMMAR_SERVICE_ and the name in capitals), the environment over
the TOML file (--config, or GRAMMAR_SERVICE_CONFIG), and that over the default.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

PREFIX = "GRAMMAR_SERVICE_"
MIB = 1 << 20


class ServiceSettings(BaseSettings):
    """Settings of `grammar-service serve`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )

    config: Path | None = Field(None, description="TOML file with settings by their names here.")
    listen: str = Field(
        "unix:/tmp/grammar-service.sock",
        description="Where to listen: unix:PATH, or HOST:PORT (port 0 takes a free one).",
    )
    socket_mode: Annotated[str, Field(pattern="^0?[0-7]{3}$")] = Field(
        "660", description="Permissions of the Unix socket, octal. The directory's group gets it."
    )
    insecure: bool = Field(
        False, description="Listen beyond loopback without TLS: for networks that you trust."
    )
    region_dir: Path | None = Field(
        None,
        description="Directory for shared-memory masks, mounted by engine and service alike, on "
        "tmpfs; made if its parent exists. Without it masks travel inline.",
    )
    tokenizers: list[Path] = Field(
        [],
        description="Hugging Face tokenizer directories or tokenizer.json files to register at "
        "start. Repeat the flag, or give a JSON list.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )
    log_format: Literal["console", "json"] = Field("console", description="How lines are written.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port for Prometheus metrics on loopback; 0 is none."
    )

    backends: list[Literal["xgrammar", "llguidance", "outlines"]] = Field(
        ["xgrammar", "llguidance", "outlines"],
        min_length=1,
        description="Grammar libraries that specs may use: auto picks among them, and a spec that "
        "asks for another is refused. Repeat the flag, or give a JSON list.",
    )
    compile_workers: PositiveInt = Field(
        max(1, (os.cpu_count() or 2) // 2),
        description="Compiles at once, each in a child process of about 300 MB.",
    )
    compile_seconds: PositiveFloat = Field(
        20.0, description="Wall-clock seconds a compile may take before it is killed."
    )
    compile_memory_bytes: PositiveInt = Field(
        2048 * MIB, description="Bytes that a compile may add to its child before it is killed."
    )
    compile_kept_bytes: PositiveInt = Field(
        512 * MIB,
        description="Bytes that a child may keep of its compiles before another takes its place: "
        "xgrammar's cache grows past its own limit. Starting one takes 2 s of a core.",
    )
    load_seconds: PositiveFloat = Field(
        5.0,
        description="Seconds of a core that the service may spend on loading a compiled grammar: "
        "llguidance's are built again, which no deadline ends. Children measure it beforehand.",
    )
    compile_queue: PositiveInt = Field(
        64, description="Compile requests at once, running and waiting; each holds a thread."
    )
    grammar_cache_bytes: PositiveInt = Field(
        1024 * MIB, description="Compiled grammars held; those of live sequences always are."
    )
    matcher_cache_bytes: PositiveInt = Field(
        1024 * MIB,
        description="Estimated bytes of live matchers. An evicted one is rebuilt by replay, a "
        "few microseconds a token.",
    )
    step_threads: PositiveInt = Field(
        1, description="Threads that fill the masks of one step. Steps of streams run side by side."
    )

    max_sequences: PositiveInt = Field(
        65_536, description="Sequences held; the one idle for longest makes room."
    )
    idle_seconds: PositiveFloat = Field(
        600.0, description="Seconds without a step after which a sequence is dropped."
    )
    max_rows: PositiveInt = Field(
        4096, description="Entries a step, and row numbers a stream: each a mask, and memory."
    )
    max_drafts: PositiveInt = Field(256, description="Drafts an entry; each costs a mask.")
    max_mask_rows: PositiveInt = Field(
        8192, description="Masks a step; inline each is 16 to 19 kB for a 128k to 152k vocabulary."
    )
    max_streams: PositiveInt = Field(64, description="Streams at once; each holds a thread.")
    schema_depth: PositiveInt = Field(
        100, description="Nesting of a JSON schema: libraries recurse on native stacks."
    )
    schema_nodes: PositiveInt = Field(
        20_000, description="Subschemas of a JSON schema: each is a rule of the grammar, or more."
    )
    schema_enum: PositiveInt = Field(
        20_000, description="Values of an enum, and of a choice: each is text in the grammar."
    )
    schema_repetition: PositiveInt = Field(
        100_000,
        description="Of maxLength, maxItems and the like, and of {n,m} in a pattern: some "
        "libraries unroll them.",
    )
    max_spec_bytes: PositiveInt = Field(
        MIB, description="Bytes of a grammar spec: a hostile one costs the compile children time."
    )
    max_message_bytes: PositiveInt = Field(
        64 * MIB, description="Bytes of a request message, and so of what one caller can take up."
    )
    max_region_bytes: PositiveInt = Field(
        1024 * MIB, description="Bytes of a shared-memory region."
    )
    max_tokenizers: PositiveInt = Field(
        16, description="Tokenizers held, about 100 MB each for 128k tokens, backends included."
    )
    grace_seconds: PositiveFloat = Field(
        10.0, description="Seconds that calls get to end after SIGTERM."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags arrive as init settings; the TOML file is named by them or by the environment."""
        named = init_settings().get("config") or os.environ.get(f"{PREFIX}CONFIG")
        if named and not Path(named).is_file():
            raise SettingsError(f"the settings file {named} doesn't exist")
        toml = [TomlConfigSettingsSource(settings_cls, Path(named))] if named else []
        return (init_settings, env_settings, *toml)
