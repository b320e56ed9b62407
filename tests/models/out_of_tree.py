"""A distribution as a third party would install it: a plugin that registers a model of its own."""

from pathlib import Path

ARCHITECTURE = "OutOfTreeForCausalLM"
PLUGIN = "out-of-tree"
BROKEN = "broken"

FILES = {
    "out_of_tree_model/__init__.py": f"""
import os

def register():
    from quire import ModelRegistry

    with open(os.environ["CALLS"], "a") as file:
        print("register", file=file)
    ModelRegistry.register_model("{ARCHITECTURE}", "out_of_tree_model.model:OutOfTree")

def fail():
    raise RuntimeError("the moon is in the wrong phase")
""",
    "out_of_tree_model/model.py": """
import os

from quire.models.llama import LlamaForCausalLM

class OutOfTree(LlamaForCausalLM):
    def process_after_loading(self):
        super().process_after_loading()
        with open(os.environ["CALLS"], "a") as file:
            print("load", file=file)
""",
    "out_of_tree_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: out-of-tree-model\nVersion: 1.0\n",
    "out_of_tree_model-1.0.dist-info/entry_points.txt": f"""
[quire.general_plugins]
{PLUGIN} = out_of_tree_model:register
{BROKEN} = out_of_tree_model:fail
""",
}


def install(folder: Path) -> Path:
    """Put `folder` on the path of a process, and it is installed there. Plugins note their calls in $CALLS."""
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder
