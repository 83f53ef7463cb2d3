"""SGLang's external model package of this project: its drafters, with the read left to the method.

Every module here is imported by ``sglang.srt.models.registry`` when ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names the
package, and the classes of its ``EntryClass`` replace SGLang's of the same name.
"""
