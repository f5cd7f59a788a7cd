"""Do manifests have the fields that their kinds have? `kubernetes_schemas.py FILE...`: a line for each document.

Standard kinds and all pods: the schemas of kubernetes-validate, where no other field may be. TrainJob and JobSet: the
models of kubeflow-trainer-api, which drop what they do not know. PyTorchJob and MPIJob: the fields by the models of
kubeflow-training. Its MPIJob is v1, and ours is v2beta1: what v2beta1 alone has would be refused here.
"""

import re
import sys
from pathlib import Path

import kubernetes_validate
import yaml
from kubeflow.training import models
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

KEPT = {
    "trainer.kubeflow.org/v1alpha1 TrainJob": TrainerV1alpha1TrainJob,
    "jobset.x-k8s.io/v1alpha2 JobSet": JobsetV1alpha2JobSet,
}
NAMED = {"kubeflow.org/v1 PyTorchJob": "KubeflowOrgV1PyTorchJob", "kubeflow.org/v2beta1 MPIJob": "KubeflowOrgV1MPIJob"}


def named(given, kind):
    """Raises KeyError for a field that this model has not."""
    inner = re.fullmatch(r"(?:list\[|dict\(str, )(\w+)[\])]", kind)
    if inner:
        for each in given.values() if isinstance(given, dict) else given:
            named(each, inner[1])
    elif hasattr(getattr(models, kind, None), "attribute_map"):
        model = getattr(models, kind)
        types = {name: model.openapi_types[mine] for mine, name in model.attribute_map.items()}
        for name, value in given.items():
            named(value, types[name])


def pods(part):
    """What stands in a manifest and has containers."""
    if isinstance(part, dict) and "containers" in part:
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": part}
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from pods(each)


def check(document):
    """Raises what the schemas say."""
    kind = f"{document['apiVersion']} {document['kind']}"
    if kind in KEPT:
        assert KEPT[kind].from_dict(document).to_dict() == document
    elif kind in NAMED:
        named(document, NAMED[kind])
    for each in pods(document) if kind in (*KEPT, *NAMED) else [document]:
        kubernetes_validate.validate(each, "1.34", strict=True)


for path in sys.argv[1:]:
    for document in yaml.safe_load_all(Path(path).read_text()):
        try:
            check(document)
            print(document["kind"], "fine")
        except Exception as error:
            print(document["kind"], "wrong:", repr(error)[:200])
