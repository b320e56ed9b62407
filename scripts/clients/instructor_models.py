"""Instructor: pydantic models from chats, in its modes: python instructor_models.py URL."""

import sys
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from steps import run_steps

URL = sys.argv[1] + "/v1"
plain = OpenAI(base_url=URL, api_key="unused", max_retries=0)
ASKED: Any = {
    "model": plain.models.list().data[0].id,
    "messages": [{"role": "user", "content": "Ada, 36 years old, is an engineer."}],
    "max_tokens": 100,
    "temperature": 0,
    "max_retries": 1,
}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    job: Literal["engineer", "doctor"]


def tools() -> None:
    """response_model by a tool (the default mode)"""
    assert isinstance(instructor.from_openai(plain).create(response_model=Person, **ASKED), Person)


def json_schema() -> None:
    """response_model by JSON schema"""
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.create(response_model=Person, **ASKED), Person)


def partial() -> None:
    """create_partial: an object that fills as the stream arrives"""
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.create_partial(response_model=Person, **ASKED)
    assert last.name is not None and last.job in ("engineer", "doctor")


async def asynchronous() -> None:
    """the asynchronous client"""
    client = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0))
    assert isinstance(await client.create(response_model=Person, **ASKED), Person)


run_steps((tools, json_schema, partial, asynchronous))
