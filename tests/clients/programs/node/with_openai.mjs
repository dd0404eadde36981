// The `openai` package for Node: chats, streams, tools, parsed answers, responses, embeddings.
//
// node with_openai.mjs [URL]

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const url = process.argv[2] ?? 'http://127.0.0.1:30000';
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 300_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: 'user', content: 'What is the weather in Rome?' }];
const Verdict = z.object({ city: z.enum(['Oslo', 'Rome']), is_warm: z.boolean() });
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Oslo', 'Rome'] } },
  required: ['city'],
  additionalProperties: false,
};
const tool = { type: 'function', function: { name: 'weather', description: 'A city\'s weather.', parameters } };

const parts = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 20 });
    assert.ok(answer.choices[0].message.content);
  },
  async chatStreamed() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 20 });
    let text = '';
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? '';
    assert.equal(await stream.finalContent(), text);
  },
  async tools() {
    const wanted = { model, messages, tools: [tool], tool_choice: 'required', max_tokens: 200 };
    const answer = await client.chat.completions.create(wanted);
    const call = answer.choices[0].message.tool_calls[0];
    assert.ok(['Oslo', 'Rome'].includes(JSON.parse(call.function.arguments).city));
    const streamed = await client.chat.completions.stream(wanted).finalMessage();
    assert.equal(streamed.tool_calls[0].function.name, 'weather');
  },
  async parsed() {
    const response_format = zodResponseFormat(Verdict, 'verdict');
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 200 });
    assert.equal(typeof answer.choices[0].message.parsed.is_warm, 'boolean');
  },
  async responses() {
    const answer = await client.responses.create({ model, input: messages, max_output_tokens: 20 });
    assert.ok(answer.output_text);
    const text = { format: zodTextFormat(Verdict, 'verdict') };
    const parsed = await client.responses.parse({ model, input: messages, text, max_output_tokens: 200 });
    assert.equal(typeof parsed.output_parsed.is_warm, 'boolean');
    const tools = [{ type: 'function', name: 'weather', parameters, strict: true }];
    const stream = client.responses.stream({
      model, input: messages, tools, tool_choice: 'required', max_output_tokens: 200,
    });
    const final = await stream.finalResponse();
    assert.equal(final.output.at(-1).type, 'function_call');
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ['a cat', 'a kitten'] });
    assert.equal(answer.data.length, 2);
  },
};

for (const [name, part] of Object.entries(parts)) {
  await part();
  console.log(`${name}: works`);
}
