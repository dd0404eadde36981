// The Vercel AI SDK: texts, streams, tools and objects, by chat, by responses and by Anthropic's route.
//
// node with_ai_sdk.mjs [URL]

import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embed, generateObject, generateText, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const url = process.argv[2] ?? 'http://127.0.0.1:30000';
const name = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const compatible = createOpenAICompatible({
  name: 'rota', baseURL: `${url}/v1`, apiKey: 'none', supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' });
const models = {
  compatible: compatible(name), chat: openai.chat(name), responses: openai.responses(name), anthropic: anthropic(name),
};
const prompt = 'What is the weather in Rome?';
const shared = { prompt, maxRetries: 0 };
const Verdict = z.object({ city: z.enum(['Oslo', 'Rome']), is_warm: z.boolean() });
const weather = tool({
  description: 'A city\'s weather.', inputSchema: z.object({ city: z.enum(['Oslo', 'Rome']) }),
});

const parts = {
  async text(model) {
    assert.ok((await generateText({ model, ...shared, maxOutputTokens: 20 })).text);
  },
  async streamed(model) {
    let text = '';
    for await (const piece of streamText({ model, ...shared, maxOutputTokens: 20 }).textStream) text += piece;
    assert.ok(text);
  },
  async tools(model) {
    const wanted = { model, ...shared, tools: { weather }, toolChoice: 'required', maxOutputTokens: 200 };
    const { toolCalls } = await generateText(wanted);
    assert.ok(['Oslo', 'Rome'].includes(toolCalls[0].input.city));
    assert.equal((await streamText(wanted).toolCalls)[0].toolName, 'weather');
  },
  async object(model) {
    const { object } = await generateObject({ model, ...shared, schema: Verdict, maxOutputTokens: 200 });
    assert.equal(typeof object.is_warm, 'boolean');
    const stream = streamObject({ model, ...shared, schema: Verdict, maxOutputTokens: 200 });
    for await (const _ of stream.partialObjectStream);
    assert.equal(typeof (await stream.object).is_warm, 'boolean');
  },
};

for (const [way, model] of Object.entries(models)) {
  for (const [part, run] of Object.entries(parts)) {
    await run(model);
    console.log(`${way} ${part}: works`);
  }
}
const { embedding } = await embed({ model: compatible.embeddingModel(name), value: 'a cat' });
assert.ok(embedding.length > 10);
console.log('embeddings: works');
