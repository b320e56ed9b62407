"""Hold a conversation, answer several at once, and let the model go on with a message. Run: python examples/chat.py"""

from quire import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=32)

    conversation = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a large city in Japan."},
    ]
    [answer] = llm.chat(conversation, params, use_tqdm=False)
    conversation.append({"role": "assistant", "content": answer.outputs[0].text})
    conversation.append({"role": "user", "content": "And one in Brazil?"})
    [answer] = llm.chat(conversation, params, use_tqdm=False)
    for message in [*conversation, {"role": "assistant", "content": answer.outputs[0].text}]:
        print(f"{message['role']}: {message['content']}")

    questions = ["What is 2 + 2?", "What colour is the sky?"]
    for output in llm.chat([[{"role": "user", "content": q}] for q in questions], params, use_tqdm=False):
        print("batch:", output.outputs[0].text)

    begun = [{"role": "user", "content": "Write a poem."}, {"role": "assistant", "content": "The moon"}]
    [rest] = llm.chat(begun, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    print("continued: The moon" + rest.outputs[0].text)
